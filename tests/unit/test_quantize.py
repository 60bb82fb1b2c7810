from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from legato.cluster import config as cluster_config
from legato.kernels import native, quantize_weight
from legato.kernels.quantize_weight import quantize_int4, quantize_int8
from legato.worker import config as worker_config
from legato.worker.weights.join_rows import join_rows
from legato.worker.weights.quantize import MODES, quantize

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.weight import QuantizedWeight

WIDTHS = [8, 24, 64, 72, 128, 200, 576]


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations; the torch one is also that of GPUs."""
    if request.param == "torch":
        monkeypatch.setattr(native, "takes", lambda *_: False)
        monkeypatch.setattr(quantize_weight, "_ROWS_AT_ONCE", 1500)  # several pieces
    elif not native.available():
        pytest.skip("no C kernels were compiled")
    return str(request.param)


def random_weight(rows: int, width: int, seed: int = 0) -> Tensor:
    """Heavier tails than a normal distribution, as real weights have; no two rows alike."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, width, generator=generator)
    return 0.05 * normal * torch.exp(0.3 * torch.randn(rows, width, generator=generator))


def groups_of(weight: Tensor, size: int) -> list[Tensor]:
    return [weight[:, start : start + size] for start in range(0, weight.shape[1], size)]


def plain_int4(weight: Tensor, size: int) -> Tensor:
    """Round to nearest over the whole range of each group: what everything better is held to."""
    done = []
    for group in groups_of(weight, size):
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        scale = (high - low) / 15
        done.append(low + scale * torch.round((group - low) / scale))
    return torch.cat(done, 1)


def error(weight: Tensor, approximate: Tensor) -> float:
    return float((weight - approximate).double().square().sum())


@pytest.mark.parametrize("width", WIDTHS)
def test_int8_rounds_to_the_nearest_of_255_levels(path: str, width: int) -> None:
    weight = random_weight(33, width)
    found = quantize_int8(weight)
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert found.group_size == width
    torch.testing.assert_close(found.scales, scale)
    assert int(found.values.min()) >= 1  # symmetric: -127 to 127
    difference = (found.dequantize() - weight).abs()
    assert bool((difference <= scale * 0.5001).all())
    assert bool((found.values.amax(1) == 255).logical_or(found.values.amin(1) == 1).all())


@pytest.mark.parametrize("group_size", [8, 64, 128])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_int4_weight_is_at_its_nearest_level(
    path: str, width: int, group_size: int, symmetric: bool
) -> None:
    weight = random_weight(33, width, seed=width)
    found = quantize_int4(weight, group_size, symmetric=symmetric)
    assert (found.group_size, found.in_features) == (group_size, width)
    steps = zip(
        groups_of(weight, group_size),
        groups_of(found.dequantize(), group_size),
        found.scales.t(),
        found.offsets.t(),
        strict=True,
    )
    for group, ours, scale, offset in steps:
        levels = torch.arange(16) * scale[:, None] + offset[:, None]  # [N, 16]
        nearest = (group[:, :, None] - levels[:, None, :]).abs().amin(-1)
        torch.testing.assert_close((group - ours).abs(), nearest, rtol=0, atol=1e-6)
        if symmetric:
            torch.testing.assert_close(offset, -8 * scale)


@pytest.mark.parametrize(("group_size", "share"), [(32, 0.95), (64, 0.92), (128, 0.9)])
def test_int4_leaves_less_error_than_the_plain_range(
    path: str, group_size: int, share: float
) -> None:
    weight = random_weight(64, 576)
    plain = error(weight, plain_int4(weight, group_size))
    asymmetric = quantize_int4(weight, group_size, symmetric=False)
    assert error(weight, asymmetric.dequantize()) < share * plain
    symmetric = quantize_int4(weight, group_size, symmetric=True)
    assert error(weight, symmetric.dequantize()) < 1.6 * plain  # a level and the offset fewer


def test_weights_that_are_on_levels_already_come_back_exactly(path: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (16, 3, 64), generator=generator)
    q[:, :, 0], q[:, :, 1] = 0, 15
    weight = ((q - 5) * 0.25 + 0.5).flatten(1)
    found = quantize_int4(weight, 64, symmetric=False)
    torch.testing.assert_close(found.dequantize(), weight, rtol=0, atol=1e-5)
    centred = ((q.clamp(1) - 8) * 0.25).flatten(1)
    centred[:, ::64] = -2.0  # level 0 of the symmetric form
    found = quantize_int4(centred, 64, symmetric=True)
    torch.testing.assert_close(found.dequantize(), centred, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_constant_and_empty_rows(path: str, mode: str) -> None:
    weight = torch.zeros(4, 128)
    weight[1] = 0.75
    weight[2] = -0.75
    weight[3] = 1e-38
    found = quantize(weight, MODES[mode]).dequantize()
    torch.testing.assert_close(found, weight, rtol=0.07, atol=1e-30)
    assert bool((found[0] == 0).all())


@pytest.mark.parametrize("mode", sorted(MODES))
def test_both_paths_and_any_number_of_threads_agree(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    if not native.available():
        pytest.skip("no C kernels were compiled")
    weight = random_weight(64, 200)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(quantize(weight, MODES[mode]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(found[0].values, other.values)
        assert torch.equal(found[0].scales, other.scales)
        assert torch.equal(found[0].offsets, other.offsets)
    monkeypatch.setattr(native, "takes", lambda *_: False)
    portable = quantize(weight, MODES[mode])
    # Sums run in another order, so a weight halfway between levels may go to the other one.
    assert float((portable.values != found[0].values).float().mean()) < 0.01
    torch.testing.assert_close(
        error(weight, portable.dequantize()),
        error(weight, found[0].dequantize()),
        rtol=0.01,
        atol=0,
    )


def test_rows_do_not_depend_on_their_neighbours(path: str) -> None:
    weight = random_weight(40, 136)
    whole = quantize_int4(weight, 64, symmetric=False)
    alone = quantize_int4(weight[17:18], 64, symmetric=False)
    assert torch.equal(whole.values[17:18], alone.values)
    assert torch.equal(whole.scales[17:18], alone.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(path: str, dtype: torch.dtype) -> None:
    weight = random_weight(64, 32).to(dtype)
    found = quantize_int4(weight.t(), 32, symmetric=False)
    same = quantize_int4(weight.float().t().contiguous(), 32, symmetric=False)
    assert torch.equal(found.values, same.values)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 12), r"multiple of 8, got \[4, 12\]"),
        (torch.zeros(4), "must be"),
        (torch.zeros(0, 8), "must be"),
        (torch.full((2, 16), float("nan")), "NaN or infinity"),
        (torch.tensor([[0.0] * 15 + [float("inf")]]).expand(2, 16), "NaN or infinity"),
    ],
)
def test_what_cannot_be_quantised(path: str, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_int8(weight)
    with pytest.raises(ValueError, match=message):
        quantize_int4(weight, 64, symmetric=False)


@pytest.mark.parametrize("group_size", [0, 4, 12, 136, -1])
def test_group_sizes_that_are_not_served(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size must be .* got {group_size}"):
        quantize_int4(torch.zeros(8, 64), group_size, symmetric=True)


def test_join_rows_changes_no_weight() -> None:
    weights = [random_weight(rows, 192, seed=rows) for rows in (8, 16, 24)]
    parts: list[QuantizedWeight] = [
        quantize_int4(weights[0], 64, symmetric=False),
        quantize_int8(weights[1]),
        quantize_int4(weights[2], 32, symmetric=True),
    ]
    joined = join_rows(parts)
    assert joined is not None
    assert (joined.bits, joined.group_size) == (8, 32)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    same = join_rows(parts[:1] * 2)
    assert same is not None
    assert (same.bits, same.group_size) == (4, 64)


def test_join_rows_of_groups_that_do_not_nest() -> None:
    weight = random_weight(8, 192)
    parts = [quantize_int4(weight, size, symmetric=True) for size in (64, 96)]
    assert join_rows(parts) is None


def test_int4_scales_and_offsets_are_fp16_numbers_unless_the_weights_are_tiny(path: str) -> None:
    weight = random_weight(16, 128)
    for symmetric in (False, True):
        found = quantize_int4(weight, 64, symmetric=symmetric)
        for numbers in (found.scales, found.offsets):
            assert torch.equal(numbers.half().float(), numbers)
    tiny = quantize_int4(weight * 1e-9, 64, symmetric=False)
    plain = error(weight * 1e-9, plain_int4(weight * 1e-9, 64))
    assert error(weight * 1e-9, tiny.dequantize()) < 0.92 * plain


@pytest.mark.parametrize("width", [200, 328])
def test_each_group_is_quantised_as_if_it_were_alone(path: str, width: int) -> None:
    weight = random_weight(9, width)
    weight[:, 192:] *= 50
    whole = quantize_int4(weight, 64, symmetric=False)
    for index, group in enumerate(groups_of(weight, 64)):
        alone = quantize_int4(group, 64, symmetric=False)
        values = whole.values[:, 32 * index : 32 * index + alone.values.shape[1]]
        assert torch.equal(values, alone.values)
        assert torch.equal(whole.scales[:, index], alone.scales[:, 0])
        assert torch.equal(whole.offsets[:, index], alone.offsets[:, 0])


def test_worker_cluster_and_modes_know_the_same_names() -> None:
    assert worker_config.WEIGHTS == cluster_config.WEIGHTS == ("auto", "keep", *MODES)
    assert MODES["int4"] == MODES["int4-g64"]
    assert [str(mode) for mode in MODES.values()][2:] == list(MODES)[2:]
