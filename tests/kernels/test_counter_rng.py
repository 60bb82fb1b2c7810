from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_paths import DEVICE

from legato.kernels import counter_rng, counter_rng_triton

PLACES = [
    (seed, index)
    for seed in (0, 1, 42, 2**63 - 1, 2**63, 0xDEADBEEFCAFEF00D, 2**64 - 1)
    for index in (0, 1, 7, 2**31, 2**40)
]
EXPECTED = [counter_rng.uniform(seed, index) for seed, index in PLACES]


def places(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = [counter_rng.signed_seed(seed) for seed, _ in PLACES]
    indices = [index for _, index in PLACES]
    return torch.tensor(seeds, device=device), torch.tensor(indices, device=device)


def test_tensors_have_the_bits_of_python() -> None:
    assert counter_rng.uniforms(*places("cpu")).tolist() == EXPECTED


@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _fill(seeds_ptr: tl.tensor, indices_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    i = tl.program_id(0)
    tl.store(
        out_ptr + i,
        counter_rng_triton.uniform(tl.load(seeds_ptr + i), tl.load(indices_ptr + i)),
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:overflow encountered")  # what whole numbers do on purpose
def test_triton_has_the_bits_of_python() -> None:
    seeds, indices = places(DEVICE)
    out = torch.empty(len(PLACES), dtype=torch.float64, device=DEVICE)
    _fill[(len(PLACES),)](seeds, indices, out)
    assert out.tolist() == EXPECTED
    if DEVICE == "cuda":
        assert counter_rng.uniforms(seeds, indices).tolist() == EXPECTED


def test_a_seed_keeps_its_bits() -> None:
    for seed, _ in PLACES:
        assert counter_rng.signed_seed(seed) % 2**64 == seed
