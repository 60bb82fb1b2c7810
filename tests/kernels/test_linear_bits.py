"""Linear layers bit for bit: a row alone and in a crowd, over threads and over instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from quantized_weights import random_quantized

from legato.kernels import native
from legato.kernels.linear import linear, pack_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.kernels.weight import Weight

pytestmark = pytest.mark.skipif(not native.available(), reason="no C kernels on this machine")

KINDS = ("f32", "bf16", "f16", "q8", "q8 group 32", "q4 group 32", "q4 group 64 zero points")
# More than one tile, panel and task; the last panel and the last groups incomplete.
SIZE_IN, SIZE_OUT, NUM_ROWS = 584, 1100, 130


def make(kind: str) -> Weight:
    """A packed weight from a fixed seed."""
    generator = torch.Generator().manual_seed(7)
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if kind in dtypes:
        return pack_weight(torch.randn(SIZE_OUT, SIZE_IN, generator=generator).to(dtypes[kind]))
    group = int(kind.split()[2]) if "group" in kind else SIZE_IN
    offsets = "zero points" if "zero points" in kind else "symmetric"
    return pack_weight(
        random_quantized(SIZE_OUT, SIZE_IN, int(kind[1]), group, offsets, generator=generator)
    )


def inputs() -> torch.Tensor:
    return torch.randn(NUM_ROWS, SIZE_IN, generator=torch.Generator().manual_seed(8))


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(kind: str) -> None:
    weight, x, bias = make(kind), inputs(), torch.randn(SIZE_OUT)
    crowd = linear(x, weight, bias)
    for row in (0, 5, NUM_ROWS - 1):
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], crowd[row])
    for count in (2, 3, 7, 12, 13, 25, 32):
        for first in (0, 41, NUM_ROWS - count):
            batch = linear(x[first : first + count], weight, bias)
            assert torch.equal(batch, crowd[first : first + count])
    assert torch.equal(linear(x.flip(0), weight, bias).flip(0), crowd)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind: str) -> None:
    weight, x = make(kind), inputs()
    torch.set_num_threads(1)
    for count in (1, 9, NUM_ROWS):
        # Other rows each time: what a thread reads too early are those of the operation before.
        shifted = [x.roll(shift, 0)[:count].contiguous() for shift in range(12)]
        expected = [linear(rows, weight) for rows in shifted]
        for num_threads in (2, 3):
            results = [torch.empty(count, SIZE_OUT) for _ in shifted]
            with native.record() as program:
                for rows, out in zip(shifted, results, strict=True):
                    linear(rows, weight, out=out)
            program.run(num_threads)
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("panels", [1, 2, 3, 5, 37, 300])
def test_every_panel_is_multiplied_just_once(panels: int) -> None:
    """A thread that is done takes panels of others': one taken twice would be added twice."""
    weight, x = pack_weight(torch.ones(panels * 32, 8)), torch.ones(1, 8)
    out = torch.zeros(1, panels * 32)
    with native.record() as program:
        for _ in range(50):
            linear(x, weight, out=out, accumulate=True)
    runs = (1, 2, 3, 7, 2, 64, 1, 2)
    for num_threads in runs:
        program.run(num_threads)
    assert torch.equal(out, torch.full_like(out, 8.0 * 50 * len(runs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_is_read_before_it_is_prepared(dtype: torch.dtype) -> None:
    """One panel, which one thread multiplies while the other may still prepare its tile."""
    weight = pack_weight(torch.randn(32, 4000).to(dtype))
    x = torch.randn(24, 4000)
    shifted = [x.roll(shift, 0) for shift in range(24)]
    results = [torch.empty(24, 32) for _ in shifted]
    with native.record() as program:
        for rows, out in zip(shifted, results, strict=True):
            linear(rows, weight, out=out)
    for _ in range(5):
        program.run(2)
        for shift, result in enumerate(results):
            assert torch.equal(result, results[0].roll(shift, 0))


_DIGEST = """
import hashlib
from test_linear_bits import inputs, make
from legato.kernels.linear import linear
for kind in {kinds}:
    result = linear(inputs()[:14], make(kind))
    print(hashlib.sha256(result.numpy().tobytes()).hexdigest())
"""


def test_kinds_but_bf16_are_the_same_on_every_level_of_instructions() -> None:
    """Sums of whole numbers are exact, and the floats around them follow one order. (bf16 is not
    the same everywhere: only the best level rounds x to bf16.)
    """
    kinds = [kind for kind in KINDS if kind != "bf16"]
    digests = {}
    for level in native.levels():
        run = subprocess.run(
            [sys.executable, "-c", _DIGEST.format(kinds=kinds)],
            env={
                **os.environ,
                "LEGATO_CPU_LEVEL": level,
                "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
            },
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests[level] = run.stdout.split()
    assert len(set(map(tuple, digests.values()))) == 1, digests
    assert all(len(lines) == len(kinds) for lines in digests.values())
