"""PromptPieces: how much of which prompts a decode step computes beside the others' tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.worker.scheduling.live import num_to_compute, rank
from legato.worker.scheduling.step import StepPart

if TYPE_CHECKING:
    from legato.worker.scheduling.decision import Decision
    from legato.worker.scheduling.live import LiveSequences
    from legato.worker.sequence import Sequence

# Beside 8 streams of a 135M model (fp32, 2 cores) a step with 16, 32, 64, 128 such tokens takes
# 2.0, 2.2, 3.2, 7 times as long as without: fewer cost more each, and more are no cheaper.
MIXED_TOKENS = 32
# A device reads its weights for them alone then, and takes hardly longer for 128 than for 32.
APART_TOKENS = 128


class PromptPieces:
    """A part of CapacityScheduler. The first in rank is served first; who gets no token sits out.

    Where a step `mixes`, up to MIXED_TOKENS of prompts go with the others' tokens. Where a device
    computes steps of one token each by other kernels, mixing would change the bits of those that
    run: there a step of up to APART_TOKENS of prompts and one of all others take turns.

    Where nothing decodes, a step may have `chunk_tokens` of prompts, if that is more.
    """

    def __init__(self, live: LiveSequences, *, mixes: bool, chunk_tokens: int = 0) -> None:
        self._live = live
        self._mixes = mixes
        self._chunk_tokens = chunk_tokens
        self._prompts_were_last = False

    def plan(self, plan: Decision, ready: list[Sequence]) -> None:
        """Adds the step's parts, in the order of `ready`."""
        if not self._live.prompts:
            plan.parts.extend(StepPart(sequence, 1) for sequence in ready)
            return
        decoding = [s for s in ready if s not in self._live.prompts]
        counts = self._counts(ready, alone=not decoding)
        apart = bool(counts) and not self._mixes
        if apart and decoding and self._prompts_were_last:
            counts = {}
        self._prompts_were_last = bool(counts)
        if apart and counts:
            decoding = []
        taking = {**dict.fromkeys(decoding, 1), **counts}
        for sequence in ready:
            if sequence in taking:
                part = StepPart(sequence, taking[sequence])
                plan.parts.append(part)
                if sequence in counts:
                    plan.prompt_parts.append(part)

    def commit(self) -> None:
        """After the rows of a step were noted."""
        done = [s for s in self._live.prompts if num_to_compute(s) == 0]
        for sequence in done:
            del self._live.prompts[sequence]

    def _counts(self, ready: list[Sequence], *, alone: bool) -> dict[Sequence, int]:
        """Tokens of each prompt that gets any. `alone`: nothing decodes in this step."""
        left = MIXED_TOKENS if self._mixes else APART_TOKENS
        if alone:
            left = max(left, self._chunk_tokens)
        counts: dict[Sequence, int] = {}
        for sequence in sorted((s for s in ready if s in self._live.prompts), key=rank):
            if left == 0:
                break
            counts[sequence] = min(left, num_to_compute(sequence))
            left -= counts[sequence]
        return counts
