"""The kernel that moves rows of K and V, compiled for GPUs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from aot import AotCase, Compiled, check, chosen, compile_file

from legato.kernels import kv_pack_triton, kv_scatter_triton
from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, E4M3 = QUANTIZED_DTYPES


def rows(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and, for 8 bits, their scales; without storage, so that no launcher reads them."""
    data = torch.empty(shape, dtype=dtype, device="meta")
    return data, torch.empty(shape[:-1], device="meta") if dtype in QUANTIZED_DTYPES else None


def pages(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> KvPages:
    data, scales = rows(64, num_kv_heads, head_dim, dtype=dtype)
    return KvPages(data, data, scales, scales)


SLOTS = torch.empty(4, dtype=torch.int64, device="meta")


def scatter(dtype: torch.dtype, kv_dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    fused, _ = rows(4, 6 * num_kv_heads, head_dim, dtype=dtype)
    k, v = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads : 3 * num_kv_heads]
    kv_scatter_triton.kv_scatter(k, v, pages(kv_dtype, num_kv_heads, head_dim), SLOTS)


def pack_and_unpack(
    kv_dtype: torch.dtype, wire_dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    data, scales = rows(2, 4, num_kv_heads, head_dim, dtype=wire_dtype)
    kv_pack_triton.kv_pack(pages(kv_dtype, num_kv_heads, head_dim), SLOTS, data, scales)
    kv_pack_triton.kv_unpack(data, scales, pages(kv_dtype, num_kv_heads, head_dim), SLOTS)


AOT_CASES = [
    AotCase("scatter bf16", lambda: scatter(BF16, BF16, 8, 128), (80, 100)),
    AotCase("scatter bf16 to int8, 32 heads of 256", lambda: scatter(BF16, INT8, 32, 256), (90,)),
    AotCase("scatter bf16 to e4m3, heads of 80", lambda: scatter(BF16, E4M3, 12, 80), (80,)),
    AotCase("pack e4m3 as bf16", lambda: pack_and_unpack(E4M3, BF16, 8, 128), (80,)),
    *(
        AotCase(
            f"pack {kv_dtype} as {wire_dtype}, {heads}",
            lambda kv_dtype=kv_dtype, wire_dtype=wire_dtype, heads=heads: pack_and_unpack(
                kv_dtype, wire_dtype, *heads
            ),
            full=True,
        )
        for kv_dtype, wire_dtype in itertools.product((FP32, FP16, BF16, INT8, E4M3), repeat=2)
        for heads in ((3, 64), (32, 256))
    ),
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


def test_no_product_is_fused_with_the_sum_that_rounds_it(
    cache: Path, compiled: list[Compiled]
) -> None:
    assert compiled
    sources = [path.read_text() for path in cache.rglob("_move_kernel.ptx")]
    assert any("div.rn.f32" in source for source in sources)
    assert not any("fma." in source for source in sources)
