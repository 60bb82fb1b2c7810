from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_paths import needs_native, use_path

from legato.kernels import native
from legato.kernels.progress import note_progress
from legato.kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


def counter() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_native), "portable"])
def test_the_number_is_there_and_a_byte_wakes(
    pipe: tuple[int, int], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    done = counter()
    note_progress(done, 2**40 + 3, pipe[1])
    assert done.item() == 2**40 + 3
    assert len(os.read(pipe[0], 100)) == 1


@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_native), "portable"])
def test_a_full_pipe_neither_blocks_nor_fails(
    pipe: tuple[int, int], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    os.write(pipe[1], bytes(1 << 20))  # as much as it takes
    with pytest.raises(BlockingIOError):
        os.write(pipe[1], b"x")
    done = counter()
    note_progress(done, 7, pipe[1])
    assert done.item() == 7


@needs_native
def test_recorded_it_tells_when_the_operations_before_are_done(pipe: tuple[int, int]) -> None:
    x, weight, out = torch.randn(3, 40), torch.ones(40), torch.zeros(3, 40)
    seen, done = torch.zeros(3, 40), counter()
    with native.record() as program:
        rms_norm(x, weight, 1e-5, out)
        note_progress(done, 1, pipe[1])
        rms_norm(out, weight, 1e-5, seen)
        note_progress(done, 2, pipe[1])
    assert done.item() == 0
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)
    for num_threads in (1, 3):
        done.zero_()
        program.run(num_threads)
        assert done.item() == 2
        assert len(os.read(pipe[0], 100)) == 2


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)]
)
def test_wrong_counters_are_refused(wrong: torch.Tensor, pipe: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="counter"):
        note_progress(wrong, 1, pipe[1])
