"""Meters: what one router counts of its requests while they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.metrics import catalogue as names
from legato.cluster.metrics.tallies import Count, Spreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.cluster.metrics.catalogue import Metric


class Meters:
    """Of one router; nothing here is shared with another."""

    def __init__(self) -> None:
        self.requests = Count(names.REQUESTS)
        self.refusals = Count(names.REFUSALS)
        self.failures = Count(names.FAILURES)
        self.answers = Count(names.ANSWERS)
        self.ttft = Spreads(names.TTFT)
        self.itl = Spreads(names.ITL)
        self.tpot = Spreads(names.TPOT)
        self.duration = Spreads(names.DURATION)
        self.phases = Spreads(names.PHASE)
        self.prefill_wait = Spreads(names.PREFILL_WAIT)
        self.prefill_model = Spreads(names.PREFILL_MODEL)
        self.kv_transfer = Spreads(names.KV_TRANSFER)
        self.prompt_tokens = Count(names.PROMPT_TOKENS)
        self.cached_tokens = Count(names.CACHED_TOKENS)
        self.generated_tokens = Count(names.GENERATED_TOKENS)
        self.handoffs = Count(names.HANDOFFS)
        self.handoff_bytes = Count(names.HANDOFF_BYTES)
        self.handoff_reused = Count(names.HANDOFF_REUSED)
        self.attempts_ended = Count(names.ATTEMPTS_ENDED)
        self.replays = Count(names.REPLAYS)
        self.replayed_tokens = Count(names.REPLAYED_TOKENS)
        self.retargets = Count(names.RETARGETS)
        self.moves = Count(names.MOVES)
        self.preemptions = Count(names.PREEMPTIONS)
        self.loop_lag = Spreads(names.LOOP_LAG)
        self.gen_ai_ttft = Spreads(names.GEN_AI_TTFT)
        self.gen_ai_tpot = Spreads(names.GEN_AI_TPOT)
        self.gen_ai_duration = Spreads(names.GEN_AI_DURATION)

    def tallies(self) -> Iterator[tuple[Metric, Count | Spreads]]:
        """All of them."""
        for tally in vars(self).values():
            yield tally.metric, tally
