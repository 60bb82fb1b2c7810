"""crc32c: every way to compute it, against the standard's examples and the library."""

from __future__ import annotations

import random

import google_crc32c
import pytest
from kernel_paths import needs_native

from legato.kernels import crc32c as op
from legato.kernels import native

DATA = random.Random(5).randbytes(70_000)
# RFC 3720, B.4, and the check value of CRC catalogues.
KNOWN = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@needs_native
@pytest.mark.parametrize("way", [0, 1, 2])
def test_every_way_at_every_length(way: int) -> None:
    if way > op.best_way():
        pytest.skip("not on this CPU")
    for data, expected in KNOWN:
        assert op.native_crc32c(data, 0, way) == expected
    whole = memoryview(DATA)
    for size in (*range(1100), 3071, 3072, 3073, 6150, 65_536, 69_990):
        for start in (0, 5):
            part = whole[start : start + size]
            expected = google_crc32c.extend(size, bytes(part))
            assert op.native_crc32c(part, size, way) == expected


@pytest.mark.parametrize("there", [pytest.param(True, marks=needs_native), False])
def test_it_goes_on_from_a_seed(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: there)
    whole = op.crc32c(DATA)
    assert whole == google_crc32c.value(DATA)
    for cut in (0, 1, 999, 4096, len(DATA)):
        assert op.crc32c(memoryview(bytearray(DATA))[cut:], op.crc32c(DATA[:cut])) == whole


@needs_native
def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        op.crc32c(memoryview(DATA)[::2])
