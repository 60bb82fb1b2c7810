from __future__ import annotations

import pytest
import torch

from legato.kernels.kv_pack import kv_pack, kv_unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_in_other_slots_bit_for_bit(dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.randn(2, 48, 3, 16).to(dtype)
    source = torch.tensor([40, 3, 17, 18])
    data = kv_pack(k_cache, v_cache, source)
    assert data.shape == (2, 4, 3, 16)
    assert data.is_contiguous()
    assert torch.equal(data[0], k_cache[source])
    assert torch.equal(data[1], v_cache[source])

    other_k, other_v = torch.randn(2, 32, 3, 16).to(dtype)
    before = other_k.clone()
    target = torch.tensor([0, 31, 5, 9])
    kv_unpack(data, other_k, other_v, target)
    assert torch.equal(other_k[target], k_cache[source])
    assert torch.equal(other_v[target], v_cache[source])
    rest = [slot for slot in range(32) if slot not in target.tolist()]
    assert torch.equal(other_k[rest], before[rest])


def test_no_rows() -> None:
    k_cache, v_cache = torch.randn(2, 8, 1, 4)
    none = torch.empty(0, dtype=torch.int64)
    before = k_cache.clone()
    data = kv_pack(k_cache, v_cache, none)
    assert data.shape == (2, 0, 1, 4)
    kv_unpack(data, k_cache, v_cache, none)
    assert torch.equal(k_cache, before)


def test_a_wrong_shape_or_dtype_writes_nothing() -> None:
    k_cache, v_cache = torch.zeros(2, 8, 2, 4)
    slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2, 4\), got \(2, 3, 2, 4\)"):
        kv_unpack(torch.ones(2, 3, 2, 4), k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"torch\.float32 like the pages, got torch\.float16"):
        kv_unpack(torch.ones(2, 2, 2, 4, dtype=torch.float16), k_cache, v_cache, slots)
    assert not k_cache.any()
    assert not v_cache.any()
