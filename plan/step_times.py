"""StepTimes: how long prefill, decode steps and hand-offs take; from a datasheet or a profile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from legato.plan import datasheets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.plan.datasheets import Datasheet
    from legato.plan.model_cost import ModelCost
    from legato.plan.profile import Profile


class StepTimes(Protocol):
    """Of one worker. Nothing gets shorter when there is more of it."""

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """One prompt alone: so many tokens, behind so many that are cached."""
        ...

    def prefill_step_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """One forward pass over parts of prompts: of each its tokens, and those computed before."""
        ...

    def decode_s(self, num_sequences: int, rows: float) -> float:
        """One step, with so many rows of KV in all."""
        ...

    def handoff_s(self, num_tokens: int) -> float:
        """What a prompt's first gap is longer than a step by: its KV is on the way."""
        ...

    @property
    def request_overhead_s(self) -> float:
        """Of each request until its first token, beside waiting and prefill."""
        ...

    @property
    def jitter(self) -> Sequence[float]:
        """Gaps between tokens over the step's time: quantiles in equal distances, ascending."""
        ...

    def bound(self, num_sequences: int, rows: float) -> str:
        """What a decode step waits for: `memory bandwidth`, `compute`, or `measured step time`."""
        ...


@dataclass(frozen=True)
class RooflineTimes:
    """The slower of what has to be read and what has to be computed, and a fixed overhead."""

    cost: ModelCost
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    prefill_chunk_tokens: int = 2048
    step_overhead_s: float = 0.0
    request_overhead_s: float = 0.0
    handoff_overhead_s: float = 0.0
    jitter: Sequence[float] = (1.0,)  # a datasheet tells of none

    @classmethod
    def of(cls, cost: ModelCost, sheet: Datasheet, link_bytes_per_s: float) -> RooflineTimes:
        """With the shares and overheads of `datasheets`."""
        return cls(
            cost,
            flops_per_s=sheet.flops_per_s * datasheets.PREFILL_SHARE,
            bytes_per_s=sheet.bytes_per_s * datasheets.DECODE_SHARE,
            link_bytes_per_s=link_bytes_per_s,
            step_overhead_s=datasheets.STEP_OVERHEAD_S,
            request_overhead_s=datasheets.REQUEST_OVERHEAD_S,
            handoff_overhead_s=datasheets.HANDOFF_OVERHEAD_S,
        )

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Each chunk reads the weights."""
        seconds, end = 0.0, context_tokens + num_tokens
        for start in range(context_tokens, end, self.prefill_chunk_tokens):
            stop = min(end, start + self.prefill_chunk_tokens)
            compute_s = self.cost.prefill_ops(start, stop, int(stop == end)) / self.flops_per_s
            read_s = self.cost.decode_bytes([start]) / self.bytes_per_s
            seconds += max(compute_s, read_s) + self.step_overhead_s
        return seconds

    def prefill_step_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """The weights are read once for all."""
        ops = sum(self.cost.prefill_ops(start, start + count) for count, start in parts)
        kv_bytes = self.cost.decode_bytes([start for _, start in parts])
        return max(ops / self.flops_per_s, kv_bytes / self.bytes_per_s) + self.step_overhead_s

    def decode_s(self, num_sequences: int, rows: float) -> float:
        """The weights once for all, and the KV of each."""
        return max(self._read_and_compute_s(num_sequences, rows)) + self.step_overhead_s

    def handoff_s(self, num_tokens: int) -> float:
        """Layers leave while the next ones are computed: the last one cannot hide."""
        transfer_s = num_tokens * self.cost.kv_bytes_per_token / self.link_bytes_per_s
        num_layers = len(self.cost.layer_windows)
        hidden_s = self.prefill_s(num_tokens) * (num_layers - 1) / num_layers
        return max(transfer_s - hidden_s, transfer_s / num_layers) + self.handoff_overhead_s

    def bound(self, num_sequences: int, rows: float) -> str:
        """The slower one."""
        read_s, compute_s = self._read_and_compute_s(num_sequences, rows)
        return "memory bandwidth" if read_s >= compute_s else "compute"

    def _read_and_compute_s(self, num_sequences: int, rows: float) -> tuple[float, float]:
        mean_rows = round(rows / max(1, num_sequences))
        kv_bytes = self.cost.decode_bytes([mean_rows]) - self.cost.weight_bytes
        read = self.cost.weight_bytes + kv_bytes * num_sequences
        ops = self.cost.decode_ops(num_sequences, round(rows))
        return read / self.bytes_per_s, ops / self.flops_per_s


class MeasuredTimes:
    """Between what was measured, a straight line; beyond, the last line goes on.

    A time that was measured below that of something smaller is taken to be as long as that: noise
    must not make a plan with more load need less.
    """

    def __init__(self, profile: Profile) -> None:
        self.request_overhead_s = profile.request_overhead_s
        self.jitter = sorted(profile.step_jitter)
        alone = [(p.num_tokens, p.seconds) for p in profile.prefill if not p.context_tokens]
        # Attention makes each token dearer the longer the prompt: a line a token, not a line.
        self._prefill_of_token = _Line([(n, s / n) for n, s in alone])
        self._prefill = _Line(alone)
        self._prefill_base_s = self._prefill.at_zero()
        self._most_prefill = max(n for n, _ in alone)
        extra = [
            (p.seconds - self.prefill_s(p.num_tokens)) / (p.num_tokens * p.context_tokens)
            for p in profile.prefill
            if p.context_tokens
        ]
        self._pair_s = max(0.0, float(np.median(extra))) if extra else 0.0
        by_size: dict[int, list[tuple[float, float]]] = {}
        for point in profile.decode:
            by_size.setdefault(point.num_sequences, []).append(
                (point.context_tokens, point.seconds)
            )
        self._decode = {size: _Line(points) for size, points in sorted(by_size.items())}
        self._handoff = _Line([(p.num_tokens, p.seconds) for p in profile.handoff])

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Each token costs more by what it sees of the context."""
        if num_tokens <= self._most_prefill:
            alone_s = self._prefill(num_tokens)
        else:
            per_token_s = max(
                self._prefill_of_token(num_tokens), self._prefill_of_token(self._most_prefill)
            )
            last_s = self._prefill(self._most_prefill)
            alone_s = max(last_s, per_token_s * num_tokens)
        return alone_s + (self._pair_s * num_tokens * context_tokens if context_tokens else 0.0)

    def prefill_step_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """What does not grow with the tokens is there once."""
        alone_s = sum(self.prefill_s(count, start) for count, start in parts)
        return alone_s - (len(parts) - 1) * self._prefill_base_s

    def decode_s(self, num_sequences: int, rows: float) -> float:
        """By the mean context."""
        context = rows / max(1, num_sequences)
        return _Line([(size, line(context)) for size, line in self._decode.items()])(num_sequences)

    def handoff_s(self, num_tokens: int) -> float:
        """As it was felt."""
        return self._handoff(num_tokens)

    def bound(self, num_sequences: int, rows: float) -> str:
        """A profile does not tell."""
        return "measured step time"


class _Line:
    """Points joined by straight lines that never fall; flat before the first."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        # Of several measurements at one place the middle one.
        at: dict[float, list[float]] = {}
        for x, y in points:
            at.setdefault(x, []).append(y)
        self._x = np.array(sorted(at), np.float64)
        self._y = np.maximum.accumulate([float(np.median(at[x])) for x in sorted(at)])
        self._slope = 0.0
        if len(self._x) > 1:
            (x0, y0), (x1, y1) = list(pairwise(zip(self._x, self._y, strict=True)))[-1]
            self._slope = float((y1 - y0) / (x1 - x0))

    def at_zero(self) -> float:
        """Where the first line would be there; at least 0."""
        if len(self._x) == 1:
            return 0.0
        slope = (self._y[1] - self._y[0]) / (self._x[1] - self._x[0])
        return max(0.0, float(self._y[0] - slope * self._x[0]))

    def __call__(self, x: float) -> float:
        beyond = max(0.0, x - float(self._x[-1]))
        return float(np.interp(x, self._x, self._y)) + beyond * self._slope


@dataclass(frozen=True)
class SlowedTimes:
    """The same, while another pool is busy on the same machine."""

    times: StepTimes
    prefill_factor: float
    decode_factor: float

    def prefill_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """See `StepTimes`."""
        return self.prefill_factor * self.times.prefill_s(num_tokens, context_tokens)

    def prefill_step_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """See `StepTimes`."""
        return self.prefill_factor * self.times.prefill_step_s(parts)

    def decode_s(self, num_sequences: int, rows: float) -> float:
        """See `StepTimes`."""
        return self.decode_factor * self.times.decode_s(num_sequences, rows)

    def handoff_s(self, num_tokens: int) -> float:
        """See `StepTimes`."""
        return self.times.handoff_s(num_tokens)

    @property
    def request_overhead_s(self) -> float:
        """See `StepTimes`."""
        return self.times.request_overhead_s

    @property
    def jitter(self) -> Sequence[float]:
        """See `StepTimes`."""
        return self.times.jitter

    def bound(self, num_sequences: int, rows: float) -> str:
        """See `StepTimes`."""
        return self.times.bound(num_sequences, rows)
