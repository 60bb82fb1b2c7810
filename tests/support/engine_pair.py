"""EnginePair: a prefill and a decode engine, and what loop, router and client do with them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from legato.kernels.kv_rows import PagedRows
from legato.protos.prefix_hash import PrefixHasher
from legato.worker.engine import Engine
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.kv.mover import KvMover
from legato.worker.kv.row_range import RowRange
from legato.worker.kv.wire import WireFormat
from legato.worker.mailbox import BrokenEvent, ParkedEvent, PreemptedEvent, TokenEvent
from legato.worker.priority import Priority
from legato.worker.sampler import launch_sample
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionRule, Claim, Newcomer, NoRoomNowError
from legato.worker.scheduling.output_lengths import OutputLengths
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.sequence import FinishReason, Sequence

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable

    from legato.text.guide_book import GuideBook
    from legato.worker.forward import Model
    from legato.worker.mailbox import Mailbox
    from legato.worker.sampler import Sampled
    from legato.worker.sampling_params import SamplingParams

BLOCK_SIZE = 4
CPU = torch.device("cpu")
HASHER = PrefixHasher("tiny", BLOCK_SIZE, kv_kind="fp32")


@dataclass
class Answer:
    """One stream of tokens, over all its stays on the decode engine."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: Priority
    local: bool = False  # prefilled by the decode engine
    sampled: list[Sampled] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    num_returns: int = 0
    num_joined: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.sampled]

    def note(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "a token after the last"
        assert event.index == len(self.sampled), "an index is skipped or doubled"
        self.sampled.append(event.sampled)
        self.finish_reason = event.finish_reason


class EnginePair:
    """Make it with `running_engines`. Admission is first come, first served."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        num_slots: int,
        overlap: bool,
        prior_tokens: int,
        risk: float,
        prefix_cache: bool,
        max_batch_size: int,
        mixes_prompts: bool,
    ) -> None:
        self.model = model
        self.prefix_cache = prefix_cache
        shape = KvShape(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_slots) if num_slots else None
        self.cache = KvCache(shape, num_blocks, CPU)
        self.ledger = CapacityLedger(
            self.pool,
            BLOCK_SIZE,
            AdmissionRule(risk=risk),
            OutputLengths(prior_tokens=prior_tokens),
        )
        self.scheduler = CapacityScheduler(
            self.pool, self.ledger, max_batch_size, self.host_pool, mixes_prompts=mixes_prompts
        )
        self.prefill_pool = BlockPool(1000)
        self.prefill_cache = KvCache(shape, 1000, CPU)
        self.failures: list[BaseException] = []
        self.num_found = 0  # blocks that the decode pool had already
        self.num_answers = 0
        self.ended: list[Answer] = []  # on the decode engine, in order
        self._read: list[Mailbox] = []  # to the last event
        self.release_delay_s = 0.0
        self.parks: random.Random | None = None  # draws who is parked, and resumes after a moment
        self.num_parked = 0
        self.guides: GuideBook | None = None  # for those who have one
        self.eos: frozenset[int] = frozenset()

        def engine(
            scheduler: PrefillScheduler | CapacityScheduler,
            cache: KvCache,
            mover: KvMover | None,
        ) -> Engine:
            return Engine(
                model=model,
                cache=cache,
                scheduler=scheduler,
                sample=launch_sample,
                device=CPU,
                max_batch_size=max_batch_size,
                loop=asyncio.get_running_loop(),
                on_failure=self.failures.append,
                counts_prompt_tokens=mover is None,
                overlap=overlap,
                mover=mover,
            )

        prefill = PrefillScheduler(self.prefill_pool, BLOCK_SIZE, 64)
        self.prefill = engine(prefill, self.prefill_cache, None)
        self.decode = engine(self.scheduler, self.cache, KvMover(self.cache, num_slots))
        self._admission = asyncio.Lock()

    def _follow_guide(self, sequence: Sequence) -> None:
        """As a worker's services do."""
        params = sequence.params
        if params.guide is not None:
            assert self.guides is not None, "set them first"
            sequence.guide = self.guides.open(
                params.guide,
                eos_token_ids=sequence.eos_token_ids,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            )
            sequence.guide.advance(sequence.output_token_ids)

    async def ask(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_answers: int = 1,
        priority: Priority = Priority.INTERACTIVE,
        *,
        local: bool = False,
    ) -> list[Answer]:
        """All answers, whatever happens to them on the way."""
        answers = [
            Answer(prompt, params.for_answer(i), self.num_answers + i, priority, local)
            for i in range(num_answers)
        ]
        self.num_answers += num_answers
        await self._stay(answers, params)
        return answers

    async def ask_together(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
        """One answer to each; decode, which has not started, starts when all have landed there."""
        tasks = [asyncio.create_task(self.ask(*request)) for request in requests]
        await self.until(lambda: self.decode.stats().waiting == len(tasks))
        self.decode.start()
        return [answer for [answer] in await asyncio.gather(*tasks)]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            assert not self.failures, self.failures
            await asyncio.sleep(0.001)
        raise AssertionError("it never came")

    async def check_all_is_back(self) -> None:
        pools = [self.pool, self.prefill_pool, *([self.host_pool] if self.host_pool else [])]
        await self.until(lambda: all(pool.usage().held == 0 for pool in pools))
        assert self.pool.usage().reserved == 0
        assert len(self.ledger) == 0
        for pool in pools:
            pool.check_integrity()
        assert not any(mailbox._events for mailbox in self._read), "told something after the end"
        stats = self.decode.stats()
        assert (stats.running, stats.waiting, stats.num_swapped) == (0, 0, 0)

    async def admit(self, newcomer: Newcomer) -> list[Claim]:
        async with self._admission:
            while True:
                try:
                    return self.ledger.admit(newcomer)
                except NoRoomNowError:
                    assert not self.failures, self.failures
                    await asyncio.sleep(0.001)

    async def _stay(self, answers: list[Answer], params: SamplingParams) -> None:
        """From admission to the end, or to where an answer is returned: then it comes again."""
        first = answers[0]
        tokens = first.prompt + first.token_ids
        newcomer = Newcomer(
            rows=len(tokens),
            max_rows=len(first.prompt) + params.max_tokens - 1,
            max_tokens=params.max_tokens,
            priority=first.priority,
            num_preemptions=first.num_preemptions,
            num_answers=len(answers),
        )
        claims = await self.admit(newcomer) if first.params.max_tokens > 1 else []
        if first.local and len(tokens) < newcomer.max_rows:
            [claim] = claims
            await self._listen(first, *self._begin_here(first, tokens, claim))
            return
        prompt = Sequence(
            list(tokens), len(first.prompt), params, self.eos, num_answers=len(answers)
        )
        self._follow_guide(prompt)
        mailbox = self.prefill.submit(prompt)
        events: list[TokenEvent] = []
        while not events:
            taken = await mailbox.take()
            assert not any(isinstance(e, BrokenEvent) for e in taken), taken
            events = [e for e in taken if isinstance(e, TokenEvent)]
        assert [e.answer for e in events] == list(range(len(answers))), "not in one go"
        for answer, event in zip(answers, events, strict=True):
            answer.note(event)
        staying = []
        if claims:
            staying = self._land(prompt, tokens, answers, claims)
        self.prefill.release(prompt, mailbox)
        await asyncio.gather(*(self._listen(*each) for each in staying))

    def _begin_here(
        self, answer: Answer, tokens: list[int], claim: Claim
    ) -> tuple[Sequence, Mailbox]:
        hasher = HASHER if self.prefix_cache else None
        hashes = hasher.block_hashes(tokens) if hasher is not None else []
        blocks, num_found = self.ledger.bind(claim, hashes[: (len(tokens) - 1) // BLOCK_SIZE])
        self.num_found += num_found
        sequence = Sequence(
            list(tokens),
            len(answer.prompt),
            answer.params,
            self.eos,
            num_computed=num_found * BLOCK_SIZE,
            block_hashes=hashes,
            hasher=hasher,
            lease=BlockLease(self.pool, blocks),
            arrival=answer.arrival,
            claim=claim,
        )
        self._follow_guide(sequence)
        return sequence, self.decode.submit(sequence)

    def _land(
        self, prompt: Sequence, tokens: list[int], answers: list[Answer], claims: list[Claim]
    ) -> list[tuple[Answer, Sequence, Mailbox]]:
        hasher = HASHER if self.prefix_cache else None
        hashes = hasher.block_hashes(tokens) if hasher is not None else []
        blocks, num_found = self.ledger.bind(claims[0], hashes)
        self.num_found += num_found
        lease = BlockLease(self.pool, blocks)
        assert prompt.lease is not None
        start = num_found * BLOCK_SIZE
        if start < len(tokens):  # a prompt that is found whole has no rows to move
            shape = self.cache.shape
            rows = RowRange(0, shape.num_layers, start, len(tokens) - start, 0, shape.num_kv_heads)
            data = memoryview(bytearray(WireFormat.of(shape, "same").num_bytes(rows)))
            taken = PagedRows(self.prefill_cache.layers, BLOCK_SIZE)
            crc = taken.read(prompt.lease.blocks, rows, shape.dtype, data, 0)
            given = PagedRows(self.cache.layers, BLOCK_SIZE)
            assert given.write(blocks, rows, shape.dtype, data, 0, crc)
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.pool.register(block, block_hash)
        num_full, rest = divmod(len(tokens), BLOCK_SIZE)
        staying = []
        for answer, claim in zip(answers, claims, strict=True):
            source = None
            own_lease = lease
            if answer.finish_reason is not None:
                self.ledger.withdraw(claim)
                continue
            if claim is not claims[0]:
                own = self.ledger.bind_fork(claim)
                self.pool.share(blocks[: num_full + bool(rest)])
                own_lease = BlockLease(self.pool, blocks[:num_full] + own)
                source = blocks[num_full] if rest else None
            sequence = Sequence(
                tokens + answer.token_ids[-1:],
                len(answer.prompt),
                answer.params,
                self.eos,
                num_computed=len(tokens),
                block_hashes=hashes,
                hasher=hasher,
                lease=own_lease,
                arrival=answer.arrival,
                claim=claim,
            )
            self._follow_guide(sequence)
            forked = claim is not claims[0]
            mailbox = self.decode.fork(sequence, source) if forked else self.decode.submit(sequence)
            staying.append((answer, sequence, mailbox))
        if answers[0].finish_reason is not None:
            lease.release()  # the others hold what they need of it
        return staying

    async def _listen(self, answer: Answer, sequence: Sequence, mailbox: Mailbox) -> None:
        returned = False
        while answer.finish_reason is None and not returned:
            for event in await mailbox.take():
                assert not returned, "told after it had left"
                if isinstance(event, TokenEvent):
                    answer.note(event)
                    answer.num_swaps = max(answer.num_swaps, event.num_swaps)
                    if self.parks is not None and self.parks.random() < 0.2:
                        self.decode.park(sequence, len(answer.sampled))
                elif isinstance(event, ParkedEvent):
                    rows = len(answer.prompt) + len(answer.sampled) - 1
                    assert event.num_rows == rows, "not all was told"
                    self.num_parked += 1
                    await asyncio.sleep(0.002)
                    self.decode.resume(sequence)
                elif isinstance(event, PreemptedEvent):
                    answer.num_preemptions = event.num_preemptions
                    answer.num_returns += 1
                    returned = True
                else:
                    assert not isinstance(event, BrokenEvent), event
                    answer.num_joined += 1
        if self.release_delay_s:
            await asyncio.sleep(self.release_delay_s)
        self.decode.release(sequence, mailbox)
        self._read.append(mailbox)
        if not returned:
            self.ended.append(answer)
        else:
            await self._stay([answer], answer.params)


@asynccontextmanager
async def running_engines(
    model: Model,
    *,
    num_blocks: int = 1000,
    num_slots: int = 0,
    overlap: bool = False,
    prior_tokens: int = 1000,
    risk: float = 0.6,
    prefix_cache: bool = False,
    max_batch_size: int = 64,
    mixes_prompts: bool = True,
    start_decode: bool = True,
) -> AsyncIterator[EnginePair]:
    """With few `prior_tokens` and much `risk` too many are let in, and victims must yield."""
    pair = EnginePair(
        model,
        num_blocks=num_blocks,
        num_slots=num_slots,
        overlap=overlap,
        prior_tokens=prior_tokens,
        risk=risk,
        prefix_cache=prefix_cache,
        max_batch_size=max_batch_size,
        mixes_prompts=mixes_prompts,
    )
    pair.prefill.start()
    if start_decode:
        pair.decode.start()
    try:
        yield pair
    finally:
        for engine in (pair.prefill, pair.decode):
            assert await asyncio.to_thread(engine.stop, 20)
    assert not pair.failures
