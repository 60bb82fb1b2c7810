"""The quantised linear, compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aot import AotCase, Compiled, check, chosen, compile_file

from legato.kernels.quant_linear_triton import linear
from legato.kernels.weight import QuantizedWeight


def launch(
    bits: int,
    num_tokens: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate: bool = False,
) -> None:
    num_in, num_out = 2304, 576
    scales = torch.empty(num_out, -(-num_in // group_size))
    values = torch.empty(num_out, num_in * bits // 8, dtype=torch.uint8)
    weight = QuantizedWeight(bits, num_in, group_size, values, scales, scales)
    bias, out = torch.empty(num_out, dtype=dtype), torch.empty(num_tokens, num_out, dtype=dtype)
    x = torch.empty(num_tokens, num_in, dtype=dtype)
    linear(x, weight, bias, out, accumulate=accumulate)


AOT_CASES = [
    AotCase("8 bits, few rows", lambda: launch(8, 4, 2304)),
    AotCase("8 bits, many rows", lambda: launch(8, 300, 2304), (80, 90)),
    AotCase("4 bits, few rows", lambda: launch(4, 4, 128), (80, 90)),
    AotCase("4 bits, many rows", lambda: launch(4, 300, 128)),
    AotCase("adding few rows", lambda: launch(4, 4, 128, accumulate=True), (90,)),
    AotCase(
        "adding many rows",
        lambda: launch(8, 300, 2304, accumulate=True),
        (80, 90),
        max_stack_bytes=16,  # two registers, outside of the loop
    ),
    AotCase("4 bits, groups of 32", lambda: launch(4, 300, 32), (80,), full=True),
    AotCase("4 bits, groups of 24", lambda: launch(4, 4, 24), (80,), full=True),
    AotCase("4 bits, fp16", lambda: launch(4, 40, 64, torch.float16), full=True),
    AotCase("4 bits, fp32", lambda: launch(4, 40, 64, torch.float32), full=True),
    AotCase("8 bits, fp32", lambda: launch(8, 4, 64, torch.float32), full=True),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aot")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> list[Compiled]:
    return compile_file(Path(__file__), cache)


@pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
def test_kernels_compile_and_fit(case: AotCase, compiled: list[Compiled]) -> None:
    check(case, compiled)


def test_every_tile_is_multiplied_by_the_same_instruction(
    cache: Path, compiled: list[Compiled]
) -> None:
    # What makes a row's bits independent of the batch: see kernels/quant_linear_triton.py.
    assert compiled
    sources = [path.read_text() for path in cache.rglob("_quant_linear_kernel.ptx")]
    assert len(sources) >= 9
    for source in sources:
        assert "wgmma" not in source
        assert "tcgen05" not in source
        if ".bf16" in source:
            assert "mma.sync.aligned.m16n8k16" in source
