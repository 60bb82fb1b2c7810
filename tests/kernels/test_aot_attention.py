"""Paged attention, compiled for GPUs."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from aot import ARCHES, AotCase, Compiled, check, chosen, compile_file

from legato.kernels import (
    paged_decode_attention_triton,
    paged_prefill_attention_triton,
    paged_rows_triton,
)
from legato.kernels.attention_plan import AttentionPlan
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages

LAUNCHERS = {
    "decode": paged_decode_attention_triton.paged_decode_attention,
    "prefill": paged_prefill_attention_triton.paged_prefill_attention,
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, E4M3 = QUANTIZED_DTYPES


def launch(
    kind: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    *,
    native_e4m3: bool,
) -> None:
    """On tensors without storage: a launcher that read one on the host would fail."""
    num_heads, num_kv_heads, head_dim = heads

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plan = AttentionPlan(
        empty(5, dtype=torch.int32),
        empty(4, dtype=torch.int32),
        empty(4, 256, dtype=torch.int32),
        block_size,
        max_queries=1 if kind == "decode" else 300,
    )
    rows = empty(64 * block_size, num_kv_heads, head_dim, dtype=kv_dtype)
    scales = empty(*rows.shape[:2], dtype=FP32) if kv_dtype in QUANTIZED_DTYPES else None
    fused = empty(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    out = empty(4, num_heads, head_dim, dtype=dtype)
    pages = KvPages(rows, rows, scales, scales)
    with mock.patch.object(paged_rows_triton, "has_e4m3", return_value=native_e4m3):
        LAUNCHERS[kind](fused[:, :num_heads], pages, plan, 0.125, None, out)


def case(
    kind: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: tuple[int, int, int],
    *arches: int,
    block_size: int = 16,
    full: bool = False,
) -> AotCase:
    """`arches` none: all. e4m3 is converted by Triton but for 8.0, as the launchers choose."""
    native_e4m3 = kv_dtype == E4M3 and 80 not in arches
    name = f"{kind} {dtype} over {kv_dtype}, heads {heads}, blocks of {block_size}".replace(
        "torch.", ""
    )
    return AotCase(
        name + (" natively" if native_e4m3 else ""),
        lambda: launch(kind, dtype, kv_dtype, heads, block_size, native_e4m3=native_e4m3),
        arches or ARCHES,
        full,
    )


HEADS = [(9, 3, 64), (32, 8, 128), (8, 4, 256)]  # SmolLM2, Llama 3, Gemma 3
QUICK = [
    case("decode", BF16, BF16, (32, 8, 128)),
    case("decode", BF16, INT8, (9, 3, 64), 90),
    case("decode", BF16, E4M3, (8, 4, 256), 80),
    case("decode", BF16, E4M3, (8, 4, 256), 90),
    case("decode", FP16, FP16, (70, 1, 80), 80, block_size=5),
    case("decode", FP32, FP32, (8, 4, 256), 90),
    case("prefill", BF16, BF16, (32, 8, 128)),
    case("prefill", BF16, INT8, (9, 3, 64), 100),
    case("prefill", BF16, E4M3, (32, 8, 128), 80),
    case("prefill", BF16, E4M3, (32, 8, 128), 90),
    case("prefill", BF16, BF16, (8, 4, 256), 80),
    case("prefill", FP32, FP32, (32, 8, 128), 80),
    case("prefill", FP16, FP16, (6, 2, 96), 90, block_size=32),
]
MATRIX = [
    case(kind, dtype, kv_dtype, heads, *arches, full=True)
    for kind, dtype, kv_dtype, heads in itertools.product(
        LAUNCHERS, (BF16, FP16, FP32), (BF16, FP16, FP32, INT8, E4M3), HEADS
    )
    if kv_dtype in (dtype, INT8, E4M3) or dtype == FP32
    for arches in (((80,), (90, 100)) if kv_dtype == E4M3 else (ARCHES,))
]
_QUICK_NAMES = {quick.name for quick in QUICK}
AOT_CASES = QUICK + [entry for entry in MATRIX if entry.name not in _QUICK_NAMES]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_file(Path(__file__), tmp_path_factory.mktemp("aot"))


@pytest.mark.parametrize("case", chosen(AOT_CASES), ids=str)
def test_kernels_compile_and_fit(case: AotCase, compiled: list[Compiled]) -> None:
    check(case, compiled)
