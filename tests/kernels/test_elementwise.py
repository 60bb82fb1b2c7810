from __future__ import annotations

import pytest
import torch

from legato.kernels import (
    kv_scatter,
    kv_scatter_triton,
    reference,
    rms_norm,
    rms_norm_triton,
    rope,
    rope_triton,
    silu_mul,
    silu_mul_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
PATHS = ["cpu", "triton"]


def random(path: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    device = DEVICE if path == "triton" else "cpu"
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (1, 64), (5, 96), (3, 577)])
def test_rms_norm(
    path: str, dtype: torch.dtype, tolerance: float, num_tokens: int, width: int
) -> None:
    module = rms_norm if path == "cpu" else rms_norm_triton
    x = random(path, num_tokens, width, dtype=dtype)
    weight = random(path, width, dtype=dtype)
    result = module.rms_norm(x, weight, 1e-5).cpu()
    expected = reference.rms_norm(x.cpu(), weight.cpu(), 1e-5)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)

    residual = random(path, num_tokens, width, dtype=dtype) * 3
    summed = residual + x
    result = module.add_rms_norm(x, residual, weight, 1e-5).cpu()
    torch.testing.assert_close(residual, summed)  # in place
    expected = reference.rms_norm(summed.cpu(), weight.cpu(), 1e-5)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_triton_add_rms_norm_refuses_a_residual_it_could_not_write() -> None:
    residual = random("triton", 4, 6).t()
    with pytest.raises(ValueError, match="residual must be contiguous"):
        rms_norm_triton.add_rms_norm(residual, residual, random("triton", 4), 1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 80, 96])
def test_rope(path: str, dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    module = rope if path == "cpu" else rope_triton
    wide = random(path, 3, 6, head_dim, dtype=dtype)
    heads, untouched = wide[:, :4], wide[:, 4:].clone()
    positions = torch.tensor([0, 1, 700])
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    expected = reference.apply_rope(heads.cpu().float(), positions, frequencies).to(dtype)
    tables = rope.rotation_tables(positions.to(heads.device), frequencies.to(heads.device), dtype)
    module.apply_rope(heads, tables)
    torch.testing.assert_close(heads.cpu(), expected, rtol=tolerance, atol=3 * tolerance)
    assert torch.equal(wide[:, 4:], untouched)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 96), (2, 1025)])
def test_silu_mul(
    path: str, dtype: torch.dtype, tolerance: float, num_tokens: int, width: int
) -> None:
    module = silu_mul if path == "cpu" else silu_mul_triton
    gate_up = random(path, num_tokens, 2 * width, dtype=dtype) * 4
    torch.testing.assert_close(
        module.silu_mul(gate_up).cpu(),
        reference.silu_mul(gate_up.cpu()),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_scatter_writes_the_slots_and_nothing_else(path: str, dtype: torch.dtype) -> None:
    module = kv_scatter if path == "cpu" else kv_scatter_triton
    fused = random(path, 5, 9, 80, dtype=dtype)  # 3 query, 3 key, 3 value heads
    k, v = fused[:, 3:6], fused[:, 6:]
    k_cache = random(path, 32, 3, 80, dtype=dtype)
    v_cache = k_cache * 2
    slots = torch.tensor([31, 0, 7, 16, 2], device=fused.device)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for t, slot in enumerate(slots.tolist()):
        expected_k[slot], expected_v[slot] = k[t], v[t]
    module.kv_scatter(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_triton_kv_scatter_refuses_heads_that_do_not_lie_together() -> None:
    k = random("triton", 2, 3, 16)
    pages = random("triton", 8, 3, 16)
    with pytest.raises(ValueError, match="v's heads must be contiguous"):
        kv_scatter_triton.kv_scatter(
            k,
            k.transpose(1, 2).contiguous().transpose(1, 2),
            pages,
            pages,
            torch.tensor([0, 1], device=k.device),
        )
