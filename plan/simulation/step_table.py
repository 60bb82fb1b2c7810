"""StepTable: times of simulated steps, each looked up once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from legato.plan.step_times import StepTimes
    from legato.worker.scheduling.decision import Decision
    from legato.worker.scheduling.step import Step

_ROWS_A_BIN = 16  # of each sequence, on average: a block


class StepTable:
    """Of all workers of a service. A step's time scatters as was measured."""

    def __init__(self, times: StepTimes, dice: random.Random) -> None:
        self._times = times
        self._decode_s: dict[tuple[int, int], float] = {}
        self._jitter = list(times.jitter)
        self._dice = dice

    def prefill_s(self, step: Step) -> float:
        """Of parts of prompts in one forward pass."""
        return self._times.prefill_step_s(
            [(part.num_tokens, part.sequence.num_computed) for part in step.parts]
        )

    def decode_s(self, step: Decision) -> float:
        """Each token of a prompt counts as one more sequence. KV that is moved costs nothing."""
        num_tokens = len(step.parts)
        if step.prompt_parts:
            num_tokens = step.num_tokens
        rows = 0
        for part in step.parts:
            rows += part.sequence.num_computed
        at = num_tokens, rows // (num_tokens * _ROWS_A_BIN)
        seconds = self._decode_s.get(at)
        if seconds is None:
            rows = round((at[1] + 0.5) * num_tokens * _ROWS_A_BIN)
            seconds = self._decode_s[at] = self._times.decode_s(num_tokens, rows)
        if len(self._jitter) == 1:
            return seconds * self._jitter[0]
        return seconds * self._jitter[int(self._dice.random() * len(self._jitter))]
