"""The linear whose sums have one order, compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aot import AotCase, Compiled, check, chosen, compile_file

from legato.kernels.linear_triton import linear


def launch(dtype: torch.dtype, depth: int, *, has_bias: bool) -> None:
    x, weight = (torch.empty(rows, depth, dtype=dtype, device="meta") for rows in (300, 576))
    bias = torch.empty(576, dtype=dtype, device="meta") if has_bias else None
    linear(x, weight, bias, torch.empty(300, 576, dtype=dtype, device="meta"))


AOT_CASES = [
    AotCase("bf16", lambda: launch(torch.bfloat16, 4096, has_bias=False)),
    AotCase("fp32 of 577", lambda: launch(torch.float32, 577, has_bias=True), (80,)),
    AotCase("fp16", lambda: launch(torch.float16, 576, has_bias=True), full=True),
    AotCase("fp32", lambda: launch(torch.float32, 576, has_bias=True), full=True),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_file(Path(__file__), tmp_path_factory.mktemp("aot"))


@pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
def test_kernels_compile_and_fit(case: AotCase, compiled: list[Compiled]) -> None:
    check(case, compiled)
