"""Predictor: what users would feel of so many prefill and decode workers; from closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from legato.plan.decode_batch import decode_batch
from legato.plan.kv_room import KvRoom
from legato.plan.prefill_queue import beyond_both, prefill_wait

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from legato.plan.decode_batch import DecodeBatch
    from legato.plan.prefill_queue import Wait
    from legato.plan.step_times import StepTimes
    from legato.plan.targets import Targets
    from legato.plan.traffic import Traffic

PERCENTS = (50.0, 90.0, 99.0)
_MAX_LENGTHS = 100  # of prompts that are looked at one by one
# A sequence joins at the next step's begin: on average half a step after it could.
_JOIN_STEPS = 0.5
_SHARING_ROUNDS = 4  # slower workers are busier, which makes others slower


@dataclass(frozen=True)
class WorkerSize:
    """Of each worker. The batch may have at most `max_batch_size` sequences."""

    kv_rows: int
    max_batch_size: int
    block_size: int = 16


@dataclass(frozen=True)
class Slowdown:
    """While workers of the other pool are busy on the same machine; 1 where each has its own."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """In the long run. `*_s` by percent of requests (TTFT) or of gaps (ITL)."""

    ttft_s: dict[float, float]
    itl_s: dict[float, float]
    prefill_busy: float
    decode_busy: float
    prefill_wait: Wait
    room_wait: Wait
    mean_sequences: float  # in a decode worker's batch
    mean_kv_rows: float  # that they hold: Little's law


class Predictor:
    """All that does not depend on the numbers of workers is worked out once."""

    def __init__(
        self,
        times: StepTimes,
        traffic: Traffic,
        size: WorkerSize,
        targets: Targets,
        slowdown: Slowdown | None = None,
    ) -> None:
        """Raises ValueError where no number of workers would do; the message says why."""
        self.traffic, self.targets, self.size = traffic, targets, size
        self._times, self._slowdown = times, slowdown or Slowdown()
        self.room = KvRoom.of(traffic, size.kv_rows, size.block_size)
        self.rows_mean = traffic.resident_rows()[0]
        self._prompts, self._shares = _spread(traffic.prompt_tokens)
        cached = (self._prompts * traffic.prefix_share).astype(np.int64)
        self.service_s = np.array(
            [
                times.prefill_s(int(n - c), int(c))
                for n, c in zip(self._prompts, cached, strict=True)
            ]
        )
        self._handoff_s = np.array([times.handoff_s(int(n)) for n in self._prompts])
        decoded = traffic.decoded_tokens.astype(np.float64)
        self._decoded_mean = float(decoded.mean())
        self._decoded_squares = float((decoded**2).mean())
        self._first_gaps = (
            float((decoded > 0).mean()) / self._decoded_mean if self._decoded_mean else 0.0
        )
        self._jitter = np.array(times.jitter, np.float64)
        # Of a step's gaps, as many as the target says are not longer than this many steps.
        at = math.ceil(targets.percent / 100 * len(self._jitter)) - 1
        self._gap_steps = max(1.0, float(self._jitter[at]))
        self._check_alone()
        self.batch_limit, self.batch_reason = self._batch_limit()
        self._steps_s = np.array([self.step_s(k) for k in range(1, self.batch_limit + 1)])

    def step_s(self, num_sequences: int) -> float:
        """Of a decode step of so many sequences of the mean length."""
        return self._times.decode_s(num_sequences, num_sequences * self.rows_mean)

    @property
    def service_mean_s(self) -> float:
        """Of a prefill."""
        return self._mean(self.service_s)

    @property
    def tokens_made_per_s(self) -> float:
        """The most KV rows that a prefill worker makes in a second, over the lengths of prompts."""
        return float((self._prompts / self.service_s).max())

    def bound(self) -> str:
        """What a step of the largest batch waits for."""
        return self._times.bound(self.batch_limit, self.batch_limit * self.rows_mean)

    def predict(self, num_prefill: int, num_decode: int) -> Prediction | None:
        """None where prompts or answers are more than so many workers can do."""
        settled = self._settle(num_prefill, num_decode)
        if settled is None:
            return None
        service_s, wait, batch = settled
        percents = sorted({*PERCENTS, self.targets.percent})
        alone_s = service_s + self._times.request_overhead_s
        gaps, weights = self._gaps(batch)
        return Prediction(
            ttft_s={p: self._ttft_s(p, alone_s, wait, batch.wait) for p in percents},
            itl_s={p: _weighted_percentile(gaps, weights, p) for p in percents},
            prefill_busy=self.traffic.rate_per_s * self._mean(service_s) / num_prefill,
            decode_busy=batch.busy,
            prefill_wait=wait,
            room_wait=batch.wait,
            mean_sequences=batch.mean_sequences,
            mean_kv_rows=batch.mean_sequences * self.room.rows_mean,
        )

    def meets(self, num_prefill: int, num_decode: int) -> bool:
        """Whether so many workers keep both targets."""
        found = self.predict(num_prefill, num_decode)
        percent = self.targets.percent
        return (
            found is not None
            and found.ttft_s[percent] <= self.targets.ttft_s
            and found.itl_s[percent] <= self.targets.itl_s
        )

    def _settle(
        self, num_prefill: int, num_decode: int
    ) -> tuple[NDArray[np.float64], Wait, DecodeBatch] | None:
        """Seconds of each prefill, the wait for it, and decode; pools that share machines are
        looked at until each is as slow as the other makes it.
        """
        prefill_factor = decode_factor = 1.0
        for rounds_left in reversed(range(_SHARING_ROUNDS)):
            service_s = self.service_s * prefill_factor
            wait = self._prefill_wait(service_s, num_prefill)
            batch = self._decode_batch(decode_factor, num_decode)
            if wait is None or batch is None:
                return None
            if not rounds_left or self._slowdown == Slowdown():
                return service_s, wait, batch
            prefill_busy = self.traffic.rate_per_s * self._mean(service_s) / num_prefill
            prefill_factor = 1 + (self._slowdown.prefill - 1) * batch.busy
            decode_factor = 1 + (self._slowdown.decode - 1) * prefill_busy
        raise AssertionError("the last round returns")

    def _batch_limit(self) -> tuple[int, str]:
        """The most sequences at once, and what sets the limit."""
        within = 0
        most = min(self.size.max_batch_size, self.room.num_sequences)
        worst = self._slowdown.decode * self._gap_steps
        while within < most and self.step_s(within + 1) * worst <= self.targets.itl_s:
            within += 1
        if within < most:
            return max(1, within), "ITL target"
        if self.room.num_sequences <= self.size.max_batch_size:
            return most, "KV memory"
        return most, "largest batch allowed"

    def _check_alone(self) -> None:
        percent, targets = self.targets.percent, self.targets
        step_s = self.step_s(1)
        gap_s = step_s * self._gap_steps
        if self._decoded_mean and gap_s > targets.itl_s:
            raise ValueError(
                f"the ITL target of {_ms(targets.itl_s)} cannot be met: a decode step of one "
                f"sequence takes {_ms(gap_s)}"
            )
        alone = self.service_s + self._times.request_overhead_s
        alone_s = _weighted_percentile(alone, self._shares, percent)
        if alone_s > targets.ttft_s:
            raise ValueError(
                f"the TTFT target of {_ms(targets.ttft_s)} cannot be met: without any wait "
                f"{percent:g} % of first tokens take {_ms(alone_s)}"
            )
        # More than the share that may be late, and each later than the target by itself.
        if self._first_gaps > 1 - percent / 100:
            gaps, weights = self._mixed_gaps(np.array([step_s]), np.array([1.0]))
            first_s = _weighted_percentile(gaps, weights, percent)
            if first_s > targets.itl_s:
                raise ValueError(
                    f"the ITL target of {_ms(targets.itl_s)} cannot be met at {percent:g} %: the "
                    f"gap behind the first token, in which the KV is handed over, takes "
                    f"{_ms(first_s)} and is {100 * self._first_gaps:.2g} % of all gaps"
                )

    def _mean(self, values: NDArray[np.float64]) -> float:
        return float((values * self._shares).sum())

    def _prefill_wait(self, service_s: NDArray[np.float64], num_workers: int) -> Wait | None:
        return prefill_wait(
            self.traffic.rate_per_s, self._mean(service_s), self._mean(service_s**2), num_workers
        )

    def _decode_batch(self, factor: float, num_workers: int) -> DecodeBatch | None:
        return decode_batch(
            self._steps_s * factor,
            self.traffic.decoded_per_s / num_workers,
            self._decoded_mean,
            self._decoded_squares,
        )

    def _gaps(self, batch: DecodeBatch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self._decoded_mean:
            return np.zeros(1), np.ones(1)
        return self._mixed_gaps(batch.step_s, batch.token_shares)

    def _mixed_gaps(
        self, step_s: NDArray[np.float64], shares: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gaps behind the first token of an answer are longer, by the hand-off and the join."""
        first = self._handoff_s[:, None] + (1 + _JOIN_STEPS) * step_s[None, :]
        first_shares = self._shares[:, None] * shares[None, :] * self._first_gaps
        others = (self._jitter[:, None] * step_s[None, :]).ravel()
        of_step = shares * (1 - self._first_gaps) / len(self._jitter)
        values = np.concatenate([others, first.ravel()])
        weights = np.concatenate([np.tile(of_step, len(self._jitter)), first_shares.ravel()])
        return values, weights

    def _ttft_s(
        self, percent: float, alone_s: NDArray[np.float64], queue: Wait, room: Wait
    ) -> float:
        """Bisects for the time that all but `percent` of the requests keep."""
        late = 1 - percent / 100

        def beyond(seconds: float) -> float:
            tails = [beyond_both(queue, room, seconds - float(own)) for own in alone_s]
            return float((np.array(tails) * self._shares).sum())

        low, high = 0.0, float(alone_s.max()) + 1e-6
        while beyond(high) > late:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if beyond(middle) > late else (low, middle)
        return high


def _spread(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Lengths and the share of each; where they are many, quantiles, rounded up."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) > _MAX_LENGTHS:
        ordered = np.sort(lengths)
        ends = np.arange(1, _MAX_LENGTHS + 1) * len(ordered) // _MAX_LENGTHS - 1
        values, counts = np.unique(ordered[ends], return_counts=True)
    return values, counts / counts.sum()


def _weighted_percentile(
    values: NDArray[np.float64], weights: NDArray[np.float64], percent: float
) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, percent / 100 * reached[-1] * (1 - 1e-12)))
    return float(values[order][min(at, len(values) - 1)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
