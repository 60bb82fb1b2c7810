"""BareEngine: one model on one thread, prefill and decode in turn; no process, socket or queue.

What a worker's engine does, without what brings requests in and carries tokens out.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from legato.bench.bare_streams import BareStreams
from legato.bench.loaded_cost import loaded_cost
from legato.bench.workload import RequestTimes
from legato.worker.guide_masks import GuideMasks
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import blocks_for
from legato.worker.kv_budget import KvBudget
from legato.worker.lifecycle import Lifecycle
from legato.worker.loading import load_model
from legato.worker.model_runner import ModelRunner
from legato.worker.node import WorkerNode
from legato.worker.sampler import SamplingRow, launch_sample, sample
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule, Newcomer
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.text.guide_matcher import GuideMatcher
    from legato.worker.config import WorkerConfig
    from legato.worker.scheduling.step import Scheduler, Step


@dataclass(frozen=True)
class StepTime:
    """One forward with its sampling."""

    seconds: float
    num_sequences: int
    decode_bytes: int  # 0 for prefill
    prefill_ops: int  # 0 for decode


@dataclass(frozen=True)
class Run:
    """What happened to the prompts, in their order."""

    requests: list[RequestTimes]
    token_ids: list[list[int]]
    steps: list[StepTime]

    @property
    def wall_s(self) -> float:
        """First request sent until the last token."""
        return max(r.token_times_s[-1] for r in self.requests) - self.requests[0].sent_s

    @property
    def decode_bytes_per_s(self) -> float | None:
        """Of the median decode step; None without one."""
        rates = [step.decode_bytes / step.seconds for step in self.steps if step.decode_bytes]
        return statistics.median(rates) if rates else None

    @property
    def prefill_ops_per_s(self) -> float | None:
        """Of the median prefill step; None without one."""
        rates = [step.prefill_ops / step.seconds for step in self.steps if step.prefill_ops]
        return statistics.median(rates) if rates else None


@dataclass
class _Request:
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class BareEngine:
    """New requests are prefilled as soon as there is a place for them, before decode goes on."""

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the model.

        Raises:
            ValueError: it, or its fit with the config, is wrong.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config)
        # The node is built for its pool and cache alone: its engine and its loop never start.
        loop = asyncio.new_event_loop()
        try:
            node = WorkerNode.build(
                config,
                loaded,
                KvBudget.of(config, loaded),
                lifecycle=Lifecycle(),
                sample=launch_sample,
                loop=loop,
                on_failure=_never_called,
            )
        finally:
            loop.close()
        self.model, self.dtype, self.device = loaded.model, loaded.dtype, loaded.device
        # What the CPU multiplies: quantised weights ("int8+bfloat16") meet activations of 8 bits.
        quantized = "+" in loaded.weights and self.device.type == "cpu"
        self.product_dtype = "int8" if quantized else str(self.dtype).removeprefix("torch.")
        self._chunk_tokens = config.prefill_chunk_tokens
        self._cache, self._pool = node.cache, node.pool
        self.guides = node.guides
        self._masks = GuideMasks()
        self._runner = ModelRunner(loaded.model, node.cache, loaded.device, config.max_batch_size)
        self.cost = loaded_cost(self.model, node.cache.shape.bytes_per_token)

    def streams(self) -> BareStreams:
        """For requests that come at any time, on the same pool: while `run` runs there are none."""
        size = self._cache.shape.block_size
        return BareStreams(self._runner, self._pool, size, self._chunk_tokens)

    @torch.inference_mode()
    def run(
        self,
        prompts: list[list[int]],
        num_at_once: int,
        max_tokens: int,
        guides: list[GuideMatcher] | None = None,
    ) -> Run:
        """Answers the prompts, at most `num_at_once` at a time, greedily and to the last token. The
        first prompts keep to `guides`.

        Raises:
            ValueError: the model's context or the cache is too small, or its logits are broken.
        """
        self._check(max(map(len, prompts)) + max_tokens, num_at_once)
        size = self._cache.shape.block_size
        prefill = PrefillScheduler(self._pool, size, self._chunk_tokens)
        ledger = CapacityLedger(self._pool, size, AdmissionRule(AdmissionMode.RESERVE))
        decode = CapacityScheduler(self._pool, ledger, num_at_once)
        waiting, guiding = deque(prompts), deque(guides or ())
        requests: list[_Request] = []
        under_way: dict[Sequence, _Request] = {}
        steps: list[StepTime] = []
        while waiting or under_way:
            while waiting and len(under_way) < num_at_once:
                sequence = _sequence(waiting.popleft(), max_tokens)
                sequence.guide = guiding.popleft() if guiding else None
                requests.append(_Request(time.perf_counter()))
                under_way[sequence] = requests[-1]
                prefill.add(sequence)
            if (step := prefill.schedule(time.monotonic())) is not None:
                prefilled, seconds = self._step(step, prefill, under_way)
                steps.append(StepTime(seconds, len(step.parts), 0, self._prefill_ops(step)))
                for sequence in prefilled:
                    joining = self._with_room(sequence, ledger)
                    under_way[joining] = under_way.pop(sequence)
                    decode.add(joining)
                continue
            step = decode.schedule(time.monotonic())
            assert step is not None, "requests are under way, but nothing can run"
            _, seconds = self._step(step, decode, under_way)
            rows = [part.sequence.num_computed for part in step.parts]
            steps.append(StepTime(seconds, len(rows), self.cost.decode_bytes(rows), 0))
        self._pool.check_integrity()
        assert self._pool.usage().held == 0, "blocks are left over"
        return Run(
            requests=[RequestTimes(r.sent_s, tuple(r.token_times_s)) for r in requests],
            token_ids=[r.token_ids for r in requests],
            steps=steps,
        )

    def _step(
        self, step: Step, scheduler: Scheduler, under_way: dict[Sequence, _Request]
    ) -> tuple[list[Sequence], float]:
        """Runs and commits; ended requests leave. Returns those that go on, and the seconds."""
        started_s = time.perf_counter()
        sampling = [part.sequence for part in step.parts if part.samples]
        pending = self._masks.begin(sampling)
        logits = self._runner.forward(step)
        masks = pending.collect() if pending is not None else {}
        rows = []
        for sequence in sampling:
            mask = masks.get(sequence)
            if isinstance(mask, ValueError):
                raise mask
            rows.append(SamplingRow.of(sequence, allowed=mask))
        sampled = sample(logits, rows) if sampling else []
        scheduler.commit(step)
        scheduler.settle(step)
        now_s = time.perf_counter()
        going_on = []
        for sequence, token in zip(sampling, sampled, strict=True):
            if token is None:
                raise ValueError("the model gave no usable logits: NaN or infinite values")
            under_way[sequence].token_times_s.append(now_s)
            under_way[sequence].token_ids.append(token.token_id)
            if sequence.append(token.token_id) is None:
                going_on.append(sequence)
                continue
            scheduler.remove(sequence)
            assert sequence.lease is not None, "finished without blocks"
            sequence.lease.release()
            del under_way[sequence]
        return going_on, now_s - started_s

    def _prefill_ops(self, step: Step) -> int:
        """Of a step that is committed."""
        spans = ((part.sequence.num_computed, part) for part in step.parts)
        return sum(
            self.cost.prefill_ops(
                end - part.num_tokens, end, int(end == part.sequence.num_prompt_tokens)
            )
            for end, part in spans
        )

    def _with_room(self, prefilled: Sequence, ledger: CapacityLedger) -> Sequence:
        """The same request for decode, in the same blocks, and with a claim on those to come."""
        assert prefilled.lease is not None, "prefilled without blocks"
        rows, max_tokens = prefilled.num_computed, prefilled.params.max_tokens
        blocks = prefilled.lease.blocks
        # What is freed last goes out first, in the same order: the rows stay where they are.
        prefilled.lease.release()
        [claim] = ledger.admit(Newcomer(rows, rows + max_tokens - 1, max_tokens))
        bound, _ = ledger.bind(claim)
        assert bound[: len(blocks)] == blocks, "the pool has dealt the prompt's blocks anew"
        return Sequence(
            prefilled.token_ids,
            prefilled.num_prompt_tokens,
            prefilled.params,
            prefilled.eos_token_ids,
            num_computed=rows,
            lease=BlockLease(self._pool, bound),
            claim=claim,
            guide=prefilled.guide,
        )

    def _check(self, context_tokens: int, num_at_once: int) -> None:
        limit = self.model.config.context_length
        if context_tokens > limit:
            raise ValueError(
                f"a request needs a context of {context_tokens} tokens, "
                f"limit {limit}: the model's context_length"
            )
        needed = num_at_once * blocks_for(context_tokens, self._cache.shape.block_size)
        if needed > self._pool.total:
            raise ValueError(
                f"{num_at_once} requests at once need {needed} KV blocks, limit "
                f"{self._pool.total}: kv_memory_bytes must be "
                f"{needed * self._cache.shape.bytes_per_block}"
            )


def _sequence(prompt: list[int], max_tokens: int) -> Sequence:
    params = SamplingParams.greedy_for(max_tokens, ignore_eos=True)
    # A copy: the engine appends the answer to it.
    return Sequence(list(prompt), len(prompt), params, frozenset())


def _never_called(cause: BaseException) -> None:
    raise cause
