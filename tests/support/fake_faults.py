"""Faults: what goes wrong at a fake worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc


@dataclass
class Faults:
    """What goes wrong; all off at first."""

    refuse_reserves: int = 0  # answers to so many Reserves: RESOURCE_EXHAUSTED
    refusal_code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED
    refuse_rows: int | None = None  # so many rows at the end, or more: RESOURCE_EXHAUSTED
    fail_prefills: int = 0  # so many prefills: INTERNAL before the first token
    fail_handoffs: int = 0  # so many hand-offs: HandoffFailed by this prefill worker
    cut_handoffs: int = 0  # so many hand-offs: HandoffFailed, for the KV did not get there
    out_of_reach: set[str] = field(default_factory=set)  # decode workers that no KV gets to
    refused_by: set[str] = field(default_factory=set)  # decode workers that take no KV of this one
    # Decode ends, for the KV stopped coming: once for each item, which several workers may share.
    lapses: list[str] = field(default_factory=list)
    skip_index: int | None = None  # decode leaves this token out
    end_at: int | None = None  # decode ends its stream, without an error, before this token
    hold_handoff: bool = False  # the KV never arrives
    hold_joining: bool = False  # decode never begins
    late_retarget: bool = False  # it crosses the word that the hand-off is done
    lose_finish: bool = False  # decode sends every token, and never the word that it was the end
    break_at: int | None = None  # no usable logits for this token, in prefill or decode
    cut_short_at: int | None = None  # decode finishes as CANCELLED before this token
    # By seed: an answer leaves as Preempted before these tokens, each once.
    preempt_at: dict[int, list[int]] = field(default_factory=dict)
    refuse_after_preemption: int = 0  # so many Reserves, from the next preemption on
    swaps: int = 0  # that decode tells of every answer
    hold_parking: bool = False  # decode parks nothing
    hold_moves: bool = False  # the KV of a parked answer does not get there
    cut_moves: int = 0  # so many of those: MoveFailed
    extra_rows: int = 0  # that decode tells of what is parked
    break_reports: int = 0  # so many times: the connection of the load reports breaks
    lose_scores: int = 0  # of a prompt's logprobs, so many are left out
