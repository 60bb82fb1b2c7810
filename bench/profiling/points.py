"""ProfilePoints: the points of a profile that need a service: prefill, hand-off, decode, both."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from legato.bench.profiling.streams import StreamEndedError
from legato.plan.profile import DecodePoint, HandoffPoint, PrefillPoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from legato.bench.profiling.settings import ProfiledSettings, ProfileWorkload
    from legato.bench.profiling.streams import BatchTime, ProfiledService

_JITTER_QUANTILES = 100
_GROWTH = 2.5  # the next length takes so much longer: it is twice as long, and attends to more


class ProfilePoints:
    """Measures them from small to large, until the time is over."""

    def __init__(
        self,
        service: ProfiledService,
        settings: ProfiledSettings,
        workload: ProfileWorkload,
        on_step: Callable[[str], None],
    ) -> None:
        self._service, self._workload, self._on_step = service, workload, on_step
        self._max_batch_size = settings.max_batch_size
        self._context_length = service.model.context_length
        self._ends_s = time.monotonic() + workload.budget_s
        self._overheads: list[float] = []
        self._prefill: dict[int, float] = {}
        self._jitter: list[float] = []

    async def measure(self) -> dict[str, Any]:
        """The fields of a profile that need the service."""
        await self._service.time_first_gap(32, 16)  # warm: pages, connections, kernels
        prefill = [point async for point in self._prefill_points()]
        if len(self._prefill) < 2:
            raise ValueError(
                f"the context of {self._context_length} tokens is too short to be measured: two "
                f"of {', '.join(map(str, self._workload.prefill_tokens))} tokens must fit"
            )
        handoff = [point async for point in self._handoff_points()]
        decode = [point async for point in self._decode_points()]
        if len({point.num_sequences for point in decode}) < 2:
            raise ValueError(
                "two sizes of decode batches could not be measured: give more KV memory"
            )
        prefill_slowdown, decode_slowdown = await self._slowdowns(decode)
        shares = (np.arange(_JITTER_QUANTILES) + 0.5) / _JITTER_QUANTILES
        jitter = np.quantile(self._jitter, shares)
        return {
            "prefill": prefill,
            "decode": decode,
            "handoff": handoff,
            "request_overhead_s": max(0.0, statistics.median(self._overheads)),
            "step_jitter": [round(float(value), 4) for value in jitter],
            "prefill_slowdown": prefill_slowdown,
            "decode_slowdown": decode_slowdown,
        }

    async def _prefill_points(self) -> AsyncIterator[PrefillPoint]:
        service, repeats = self._service, self._workload.num_repeats
        for num_tokens in self._fitting(self._workload.prefill_tokens, share=0.35, extra=1):
            self._on_step(f"prefill of {num_tokens:,} tokens")
            times = [await service.time_prompt(service.prompt(num_tokens)) for _ in range(repeats)]
            self._overheads += [one.ttft_s - one.model_s for one in times]
            self._prefill[num_tokens] = statistics.median(one.model_s for one in times)
            yield PrefillPoint(
                num_tokens=num_tokens, context_tokens=0, seconds=self._prefill[num_tokens]
            )
        longest = max(self._prefill, default=0)
        num_new = min((n for n in self._prefill if 4 * n >= longest), default=0)
        if not num_new or longest + num_new >= self._context_length:
            return
        self._on_step(f"prefill of {num_new:,} tokens behind {longest:,} cached ones")
        for _ in range(repeats):
            prompt = service.prompt(longest)
            await service.time_prompt(prompt)
            one = await service.time_prompt([*prompt, *service.prompt(num_new)])
            if one.cached_tokens:
                yield PrefillPoint(
                    num_tokens=one.num_tokens,
                    context_tokens=one.cached_tokens,
                    seconds=one.model_s,
                )

    async def _handoff_points(self) -> AsyncIterator[HandoffPoint]:
        steps = self._workload.num_steps
        for num_tokens in self._fitting(tuple(self._prefill), share=0.45, extra=steps + 2):
            self._on_step(f"hand-off of {num_tokens:,} tokens")
            gaps = [
                await self._service.time_first_gap(num_tokens, min(steps, 16))
                for _ in range(self._workload.num_repeats)
            ]
            yield HandoffPoint(num_tokens=num_tokens, seconds=statistics.median(gaps))

    async def _decode_points(self) -> AsyncIterator[DecodePoint]:
        alone_s: float | None = None
        points = [
            (size, context)
            for size in self._workload.batch_sizes
            for context in self._workload.contexts
            if size <= self._max_batch_size
        ]
        # Two sizes are the least that a profile has.
        least = len([x for x in points if x[0] <= self._workload.batch_sizes[1]])
        for number, (size, context) in enumerate(points):
            if number >= least and time.monotonic() > self._ends_s:
                self._on_step(f"the time is over: no more of {size} at once and above")
                return
            found = await self._decode_point(size, context, alone_s)
            if found is None:
                continue
            alone_s = alone_s or found.step_s
            self._jitter += [gap / found.step_s for gap in found.gaps_s]
            yield DecodePoint(
                num_sequences=size,
                context_tokens=round(found.mean_rows),
                seconds=found.step_s,
            )

    async def _decode_point(
        self, size: int, context: int, alone_s: float | None
    ) -> BatchTime | None:
        """None where there is no room for it."""
        max_tokens = self._tokens_until_all_decode(size, context, alone_s)
        while True:
            rows = size * (context + max_tokens)
            if (
                context + max_tokens > self._context_length
                or rows > self._service.model.decode_kv_tokens
            ):
                self._on_step(f"decode of {size} at once behind {context:,} tokens: no room")
                return None
            self._on_step(f"decode of {size} at once behind {context:,} tokens")
            try:
                async with self._service.batch(size, context, max_tokens) as batch:
                    return await batch.measure(self._workload.num_steps)
            except StreamEndedError:  # prompts took longer than when they were measured
                max_tokens *= 2

    def _tokens_until_all_decode(self, size: int, context: int, alone_s: float | None) -> int:
        """What the first stream needs while the others' prompts are computed, and then some."""
        lengths = sorted(self._prefill)
        prefill_s = float(np.interp(context, lengths, [self._prefill[n] for n in lengths]))
        prefill_s *= max(1.0, context / lengths[-1]) ** 2
        waiting = 0 if alone_s is None else int(2 * (size - 1) * prefill_s / alone_s)
        return waiting + 2 * self._workload.num_steps + 16

    async def _slowdowns(self, decode: Sequence[DecodePoint]) -> tuple[float, float]:
        """(of prefill, of decode) while the other is busy, over what each took alone."""
        num_tokens = max(n for n in self._prefill if n <= 512 or n == min(self._prefill))
        point = max(
            (p for p in decode if p.num_sequences <= 8),
            key=lambda p: (p.num_sequences, -p.context_tokens),
        )
        self._on_step("both at once")
        context = point.context_tokens
        room = self._context_length - context - 1
        per_sequence = self._service.model.decode_kv_tokens // point.num_sequences - context - 16
        max_tokens = max(1, min(room, per_sequence))
        prefill: list[float] = []

        async def keep_prefilling() -> None:
            while True:
                one = await self._service.time_prompt(self._service.prompt(num_tokens))
                prefill.append(one.model_s)

        try:
            async with self._service.batch(point.num_sequences, context, max_tokens) as batch:
                busy = asyncio.create_task(keep_prefilling())
                try:
                    found = await batch.measure(2 * self._workload.num_steps)
                finally:
                    busy.cancel()
                    await asyncio.gather(busy, return_exceptions=True)
        except StreamEndedError:  # the context has no room for a batch that lasts
            self._on_step("both at once: not measured, the context is too short")
            return 1.0, 1.0
        prefill_ratio = statistics.median(prefill) / self._prefill[num_tokens] if prefill else 1.0
        return max(1.0, prefill_ratio), max(1.0, statistics.mean(found.gaps_s) / point.seconds)

    def _fitting(self, lengths: Sequence[int], share: float, extra: int) -> Iterator[int]:
        """Those that the context has room for with `extra` tokens more, while there is time."""
        ends_s = self._ends_s - (1 - share) * self._workload.budget_s
        took_s, began_s = 0.0, time.monotonic()
        for number, num_tokens in enumerate(lengths):
            took_s, began_s = time.monotonic() - began_s, time.monotonic()
            if num_tokens + extra > self._context_length:
                return
            if number >= 2 and began_s + _GROWTH * took_s > ends_s:
                self._on_step(
                    f"the time is over: no more prompts of {num_tokens:,} tokens and above"
                )
                return
            yield num_tokens
