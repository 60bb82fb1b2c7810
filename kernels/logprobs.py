"""logprobs: log-softmax of one token a row, and of the row's most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous_rows, require_dtype, require_shape


def logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For rows [R, V] fp32 with a finite maximum and no NaN; -inf stays -inf.

    Args:
        logits: rows may have any stride.
        token_ids: [R] int64.
        count: of the best tokens, >= 0; more than V are V.

    Returns:
        The logprobs of `token_ids` [R] fp32, and values [R, count] fp32 and ids [R, count] int64
        of the best, best first and equal logits by lower id. All within 1e-4 of exact.
    """
    num_rows, vocab_size = logits.shape
    require_shape(token_ids, (num_rows,), "token_ids")
    require_dtype(token_ids, torch.int64, "token_ids")
    require_dtype(logits, torch.float32, "logits")
    require_contiguous_rows(logits=logits)
    count = min(count, vocab_size)
    if native.takes(logits):
        own = torch.empty(num_rows)
        values = torch.empty(num_rows, count)
        ids = torch.empty(num_rows, count, dtype=torch.int64)
        tensors = (logits, token_ids.contiguous(), own, values, ids)
        sizes = (num_rows, vocab_size, logits.stride(0), count)
        native.launch("lg_logprobs", tensors, sizes, num_tasks=num_rows)
        return own, values, ids
    if logits.is_cuda:
        from legato.kernels import logprobs_triton

        log_sums = logprobs_triton.log_sums(logits)
    else:
        best = logits.amax(-1, keepdim=True)
        log_sums = torch.cat((best, (logits - best).double().logsumexp(-1, keepdim=True)), 1)
    ids = _best_ids(logits, count)
    logits = logits.gather(1, torch.cat((token_ids[:, None], ids), 1))
    values = ((logits - log_sums[:, :1]) - log_sums[:, 1:]).float()
    return values[:, 0], values[:, 1:], ids


def _best_ids(logits: Tensor, count: int) -> Tensor:
    """[R, count]: the ids of the largest, equal ones by lower id."""
    # As whole numbers, no two are equal: the logits' order above, the ids' below.
    bits = (logits + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    order -= torch.arange(logits.shape[1], device=logits.device)
    return order.topk(count).indices
