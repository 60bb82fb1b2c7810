"""The norms, activations, rope and rows, compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aot import AotCase, Compiled, check, chosen, compile_file

from legato.kernels import (
    gated_triton,
    layer_norm_triton,
    rms_norm_triton,
    rope_triton,
    rows_triton,
)
from legato.kernels.weight import QuantizedWeight

EPS = 1e-5


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def table(bits: int) -> QuantizedWeight:
    scales = torch.empty(100, 16)
    return QuantizedWeight(
        bits, 2048, 128, empty(100, 2048 * bits // 8, dtype=torch.uint8), scales, scales
    )


def rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = empty(4, width, dtype=dtype), empty(width, dtype=dtype)
    rms_norm_triton.rms_norm(x, weight, EPS, x)
    rms_norm_triton.add_rms_norm(x, x, weight, EPS, x)
    rms_norm_triton.rms_norm_add(x, x, weight, EPS)


def layer_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = empty(4, width, dtype=dtype), empty(width, dtype=dtype)
    layer_norm_triton.layer_norm(x, None, weight, weight, EPS, x)
    layer_norm_triton.layer_norm(x, x, weight, weight, EPS, x)


def heads(head_dim: int, dtype: torch.dtype) -> None:
    fused = empty(4, 12, head_dim, dtype=dtype)
    rms_norm_triton.rms_norm(fused[:, :10], empty(head_dim), EPS, fused[:, :10])
    rope_triton.apply_rope(fused[:, :10], torch.empty(4, 2, head_dim // 2))


def tables(head_dim: int) -> None:
    positions, out = torch.zeros(4, dtype=torch.int64), torch.empty(4, 2, head_dim // 2)
    rope_triton.rotation_tables(positions, torch.empty(head_dim // 2), out, scale=1.25)


def activations(dtype: torch.dtype) -> None:
    for kind in ("silu_mul", "gelu_mul", "gelu"):
        width = 1536 if kind == "gelu" else 3072
        gated_triton.activate(kind, empty(4, width, dtype=dtype), empty(4, 1536, dtype=dtype))


def rows(source: torch.Tensor | QuantizedWeight, width: int) -> None:
    indices = torch.zeros(4, dtype=torch.int64)
    for add in (False, True):
        rows_triton.take_rows(source, indices, empty(4, width), scale=1.5, add=add)


AOT_CASES = [
    AotCase("norms of 4096, bf16", lambda: rms_norm(4096, torch.bfloat16), (80, 100)),
    AotCase("norms of 16384, fp32", lambda: rms_norm(16384, torch.float32), (90,)),
    AotCase("norms of 577, fp16", lambda: rms_norm(577, torch.float16), (80,), full=True),
    AotCase("layer norms of 1600, bf16", lambda: layer_norm(1600, torch.bfloat16), (90,)),
    AotCase("layer norms of 768, fp32", lambda: layer_norm(768, torch.float32), full=True),
    AotCase("heads of 128", lambda: heads(128, torch.bfloat16), (80, 90)),
    AotCase("heads of 80", lambda: heads(80, torch.float32), (80,), full=True),
    AotCase("heads of 256", lambda: heads(256, torch.float16), (90,), full=True),
    # Angles beyond 105,615 are reduced with the help of seven words of memory.
    AotCase("rotation tables of 128", lambda: tables(128), max_stack_bytes=32),
    AotCase("rotation tables of 80", lambda: tables(80), full=True, max_stack_bytes=32),
    AotCase("activations, bf16", lambda: activations(torch.bfloat16), (90,)),
    AotCase("activations, fp32", lambda: activations(torch.float32), full=True),
    AotCase("rows, bf16", lambda: rows(empty(100, 2048), 2048), (80,)),
    AotCase("rows, fp32", lambda: rows(torch.empty(100, 577), 577), full=True),
    AotCase("rows, 8 bits", lambda: rows(table(8), 2048), (90,)),
    AotCase("rows, 4 bits", lambda: rows(table(4), 2048), (80,)),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_file(Path(__file__), tmp_path_factory.mktemp("aot"))


@pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
def test_kernels_compile_and_fit(case: AotCase, compiled: list[Compiled]) -> None:
    check(case, compiled)
