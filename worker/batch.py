"""From a Step to a ForwardBatch: the only place where a schedule becomes tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from legato.kernels.attention_plan import AttentionPlan
from legato.worker.forward import ForwardBatch, new_tensor
from legato.worker.kv.block_pool import blocks_for
from legato.worker.prompt_scores import ScoredRows

if TYPE_CHECKING:
    from legato.worker.forward import Empty
    from legato.worker.layer_reports import LayerReports
    from legato.worker.prompt_scores import PromptScores
    from legato.worker.scheduling.step import Step
    from legato.worker.sequence import Sequence
    from legato.worker.unread import UnreadTokens


def build_batch(
    step: Step,
    block_size: int,
    device: torch.device,
    *,
    unread: UnreadTokens | None = None,
    reports: LayerReports | None = None,
    empty: Empty = new_tensor,
) -> ForwardBatch:
    """Packs the parts without padding; asks for logits of the parts that sample.

    Input tokens that the CPU does not know yet come from `unread`.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    block_tables: list[list[int]] = []
    logit_rows: list[int] = []
    unread_places: list[tuple[int, Sequence]] = []
    scored_rows: list[int] = []
    targets: list[int] = []
    shares: list[tuple[PromptScores, int]] = []
    for part in step.parts:
        sequence = part.sequence
        assert sequence.lease is not None, "scheduled without blocks"
        blocks = sequence.lease.blocks
        start, end = sequence.num_computed, sequence.num_computed + part.num_tokens
        scored_end = min(end, sequence.num_prompt_tokens - 1)
        if sequence.prompt_scores is not None and start < scored_end:
            first = len(token_ids)
            scored_rows += range(first, first + scored_end - start)
            targets += sequence.token_ids[start + 1 : scored_end + 1]
            shares.append((sequence.prompt_scores, scored_end - start))
        token_ids += sequence.token_ids[start:end]
        if end > len(sequence.token_ids):
            unread_places.append((len(token_ids), sequence))
            token_ids.append(0)
        positions += range(start, end)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        query_starts.append(len(token_ids))
        context_lens.append(end)
        block_tables.append(blocks[: blocks_for(end, block_size)])
        if part.samples:
            logit_rows.append(len(token_ids) - 1)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    tokens = tensor(token_ids)
    if unread_places:
        assert unread is not None, "a step reads tokens that were never sampled"
        unread.copy_into(tokens, unread_places)
    scores = None
    if shares:
        most = max(prompt.count for prompt, _ in shares)
        scores = ScoredRows(tensor(scored_rows), tensor(targets), most, shares)
    return ForwardBatch(
        token_ids=tokens,
        positions=tensor(positions),
        slots=tensor(slots),
        plan=AttentionPlan.build(query_starts, context_lens, block_tables, block_size, device),
        logit_rows=tensor(logit_rows),
        empty=empty,
        reports=reports,
        scores=scores,
    )
