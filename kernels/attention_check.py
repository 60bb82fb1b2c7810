"""check_attention: what a launch of paged attention asks of its tensors, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.kv_pages import check_pages
from legato.kernels.layout import (
    require_contiguous,
    require_contiguous_rows,
    require_dtype,
    require_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from legato.kernels.attention_plan import AttentionPlan
    from legato.kernels.kv_pages import KvPages


def check_attention(
    q: Tensor, pages: KvPages, plan: AttentionPlan, window: int | None, out: Tensor
) -> None:
    """Raises ValueError naming what the kernels would read or write wrongly.

    Reads no tensor: lengths and block ids, which change from step to step, are the caller's.
    """
    num_tokens, num_heads, head_dim = q.shape
    require_contiguous_rows(q=q)
    if num_heads % pages.num_kv_heads:
        raise ValueError(f"q's {num_heads} heads do not share {pages.num_kv_heads} KV heads evenly")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    require_shape(pages.k, (pages.k.shape[0], pages.num_kv_heads, head_dim), "pages.k")
    check_pages(pages)
    require_shape(out, (num_tokens, num_heads, head_dim), "out")
    require_dtype(out, q.dtype, "out")
    require_contiguous(out=out)
    for name, tensor, size in (
        ("query_starts", plan.query_starts, plan.num_sequences + 1),
        ("context_lens", plan.context_lens, plan.num_sequences),
        ("block_table", plan.block_table, plan.num_sequences),
    ):
        fits = tensor.dtype == torch.int32 and tensor.device == q.device
        if not fits or tensor.shape[0] != size or tensor.stride(-1) != 1:
            raise ValueError(
                f"the plan's {name} must be int32 on {q.device} with {size} rows and a last stride "
                f"of 1, got {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}"
            )
    if plan.one_query_each and num_tokens != plan.num_sequences:
        raise ValueError(
            f"q must have a row for each of {plan.num_sequences} sequences, got {num_tokens}"
        )
