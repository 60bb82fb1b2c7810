"""One wrong tensor at a time is refused by name, before C reads or writes what is not there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from paged_kv import make_case

from legato.kernels.choose import Choices, choose
from legato.kernels.gated import gelu_mul, silu_mul
from legato.kernels.kv_pack import kv_pack, kv_unpack
from legato.kernels.kv_scatter import kv_scatter
from legato.kernels.layer_norm import layer_norm
from legato.kernels.logprobs import logprobs
from legato.kernels.paged_decode_attention import paged_decode_attention
from legato.kernels.paged_prefill_attention import paged_prefill_attention
from legato.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from legato.kernels.rope import apply_rope, rotation_tables
from legato.kernels.rows import take_rows
from legato.kernels.weight import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from legato.kernels.kv_pages import KvPages

SLOTS = torch.tensor([3, 1])
WRONG_PAGES: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("pages.v must have shape", "v", lambda v: v[:-1]),
    ("pages.v must have shape", "v", lambda v: v[..., :-1].contiguous()),
    ("pages.v must be torch.int8, got torch.uint8", "v", lambda v: v.view(torch.uint8)),
    ("pages.k must be contiguous", "k", lambda k: k.repeat(1, 1, 2)[..., ::2]),
    ("pages.k_scale must have shape", "k_scale", lambda scale: scale[:-1]),
    ("pages.v_scale must be torch.float32", "v_scale", lambda scale: scale.double()),
    ("pages.v_scale must be contiguous", "v_scale", lambda scale: scale.repeat(1, 2)[:, ::2]),
]


def use_pages(op: str) -> Callable[[KvPages], object]:
    case = make_case(context_lens=[5, 9], num_queries=[1, 1], kv_dtype=torch.int8)
    data = torch.zeros(2, 2, 2, 16, dtype=torch.int8)
    plan = dataclasses.replace(case.plan, max_queries=2)
    uses: dict[str, Callable[[KvPages], object]] = {
        "decode": lambda pages: paged_decode_attention(case.q, pages, case.plan, 1.0),
        "prefill": lambda pages: paged_prefill_attention(case.q, pages, plan, 1.0),
        "scatter": lambda pages: kv_scatter(case.q[:, :2], case.q[:, 2:], pages, SLOTS),
        "pack": lambda pages: kv_pack(pages, SLOTS, data, torch.ones(2, 2, 2)),
        "unpack": lambda pages: kv_unpack(data, torch.ones(2, 2, 2), pages, SLOTS),
    }
    return uses[op]


@pytest.mark.parametrize("op", ["decode", "prefill", "scatter", "pack", "unpack"])
@pytest.mark.parametrize(("message", "field", "change"), WRONG_PAGES)
def test_pages(op: str, message: str, field: str, change: Callable[[Tensor], Tensor]) -> None:
    pages = make_case(context_lens=[5, 9], num_queries=[1, 1], kv_dtype=torch.int8).pages
    use = use_pages(op)
    use(pages)
    wrong = dataclasses.replace(pages, **{field: change(getattr(pages, field))})
    with pytest.raises(ValueError, match=message):
        use(wrong)


@pytest.mark.parametrize("attend", [paged_decode_attention, paged_prefill_attention])
def test_plans(attend: Callable[..., Tensor]) -> None:
    case = make_case(context_lens=[5, 9], num_queries=[1, 1])
    for message, changes in (
        ("query_starts must be int32 on cpu with 3 rows", {"query_starts": SLOTS.int()}),
        ("context_lens must be int32 on cpu", {"context_lens": case.plan.context_lens.float()}),
        ("block_table must be int32 .* 2 rows", {"block_table": case.plan.block_table[:1]}),
    ):
        plan = dataclasses.replace(case.plan, **changes)
        with pytest.raises(ValueError, match=message):
            attend(case.q, case.pages, plan, 1.0)
    with pytest.raises(ValueError, match="q must have a row for each of 2 sequences, got 1"):
        attend(case.q[:1], case.pages, case.plan, 1.0)


def test_vectors_of_norms_must_be_contiguous() -> None:
    x, good = torch.ones(2, 8), torch.ones(8)
    apart = torch.ones(16)[::2]
    for norm in (
        lambda: rms_norm(x, apart, 1e-5),
        lambda: add_rms_norm(x, x.clone(), apart, 1e-5),
        lambda: rms_norm_add(x, x.clone(), apart, 1e-5),
        lambda: layer_norm(x, apart, good, 1e-5),
    ):
        with pytest.raises(ValueError, match="weight must be contiguous"):
            norm()
    with pytest.raises(ValueError, match="bias must be contiguous"):
        layer_norm(x, good, apart, 1e-5)


def test_integers_of_another_width() -> None:
    short = SLOTS.int()
    with pytest.raises(ValueError, match=r"positions must be torch\.int64, got torch\.int32"):
        rotation_tables(short, torch.ones(4), torch.empty(2, 2, 4))
    with pytest.raises(ValueError, match=r"indices must be torch\.int64, got torch\.int32"):
        take_rows(torch.ones(8, 4), short, torch.empty(2, 4))
    with pytest.raises(ValueError, match=r"token_ids must be torch\.int64, got torch\.int32"):
        logprobs(torch.ones(2, 8), short, 1)
    reals, integers = torch.ones(2, 3).double(), torch.zeros(2, 3).long()
    for message, choices in (
        (r"reals must be torch\.float64", Choices(reals.float(), integers)),
        (r"integers must be torch\.int64", Choices(reals, integers.int())),
    ):
        with pytest.raises(ValueError, match=message):
            choose(torch.ones(2, 8), choices)


def test_odd_widths() -> None:
    for activate in (silu_mul, gelu_mul):
        with pytest.raises(ValueError, match="gate_up must have an even width, got 7"):
            activate(torch.ones(2, 7))
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        apply_rope(torch.ones(2, 3, 7), torch.ones(2, 2, 3))


def test_parts_of_quantised_weights() -> None:
    values, scales = torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1)
    for name, parts in (
        ("values must be torch.uint8", (values.int(), scales, scales)),
        ("scales must be torch.float32", (values, scales.half(), scales)),
        ("offsets must be torch.float32", (values, scales, scales.double())),
    ):
        with pytest.raises(ValueError, match=name):
            QuantizedWeight(8, 8, 8, *parts)
