"""Rows that an engine tells of while it computes are, bit for bit, those of the end."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_paths import needs_native, use_path
from model_checks import build, random_tokens
from tiny_models import FAMILIES, make_model

from legato.kernels.rows import take_rows
from legato.protos.prefix_hash import PrefixHasher
from legato.worker import layer_reports
from legato.worker.engine import Engine
from legato.worker.flight import Flight
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.kv.progress import KvProgress
from legato.worker.layer_reports import LayerReports
from legato.worker.layer_signal import LayerSignal
from legato.worker.mailbox import TokenEvent
from legato.worker.sampler import launch_sample
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.scheduling.step import Step, StepPart
from legato.worker.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from torch import Tensor

    from legato.worker.forward import Model
    from legato.worker.mailbox import Mailbox

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, CHUNK_TOKENS = 16, 12, 40
LENGTHS = [70, 21, 1, 33]  # chunks of long ones, several prompts a step, one of a single token
NEVER_WRITTEN = 7.0
PATHS = [pytest.param("native", marks=needs_native), "portable"]
HASHER = PrefixHasher("tiny", BLOCK_SIZE, kv_kind="fp32")


@dataclass(frozen=True)
class Claim:
    """At one report: what is said to be available, and what is in the pages."""

    rows: list[list[int]]  # of each prompt, of each layer
    pages: list[tuple[Tensor, Tensor]]  # K and V of each layer


@dataclass
class Bench:
    """A prefill engine over pages that hold no zeros where nothing was written."""

    engine: Engine
    cache: KvCache
    pool: BlockPool
    progresses: list[KvProgress] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    open: list[tuple[Sequence, Mailbox]] = field(default_factory=list)

    def submit(self, tokens: list[int], *, cached: bool = False) -> tuple[KvProgress, Mailbox]:
        progress = KvProgress(self.cache.shape.num_layers, len(tokens))
        self.progresses.append(progress)
        return progress, self.submit_with(tokens, progress, cached=cached)

    def submit_with(
        self, tokens: list[int], progress: KvProgress | None, *, cached: bool = False
    ) -> Mailbox:
        sequence = Sequence(
            list(tokens),
            len(tokens),
            SamplingParams.greedy_for(4),
            frozenset(),
            block_hashes=HASHER.block_hashes(tokens) if cached else [],
            progress=progress,
        )
        mailbox = self.engine.submit(sequence)
        self.open.append((sequence, mailbox))
        return mailbox

    def rows(self, progress: KvProgress, layer: int, start: int, end: int) -> Tensor:
        """[2, end - start, num_kv_heads, head_dim], a copy."""
        assert progress.lease is not None, "rows without a lease"
        pages = self.cache.layers[layer]
        slots = self.slots(progress)[start:end]
        return torch.stack((pages.k[slots], pages.v[slots]))

    def slots(self, progress: KvProgress) -> Tensor:
        assert progress.lease is not None, "rows without a lease"
        blocks = torch.tensor(progress.lease.blocks)
        return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()

    async def read(self, progress: KvProgress, on_pass: Callable[[], None]) -> list[Tensor]:
        """Reads rows as soon as they are said to be there; of each layer, all of them."""
        layers = range(progress.num_layers)
        pieces: list[list[Tensor]] = [[] for _ in layers]
        counts = [0 for _ in layers]
        while min(counts) < progress.num_tokens:
            await progress.changed()
            for layer in layers:
                available = progress.available(layer)
                assert counts[layer] <= available <= progress.num_tokens
                if available > counts[layer]:
                    pieces[layer].append(self.rows(progress, layer, counts[layer], available))
                    counts[layer] = available
            on_pass()
        return [torch.cat(parts, 1) for parts in pieces]


@asynccontextmanager
async def running(model: Model, *, overlap: bool = False) -> AsyncIterator[Bench]:
    config = model.config
    shape = KvShape(
        config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, torch.float32
    )
    cache, pool = KvCache(shape, NUM_BLOCKS, CPU), BlockPool(NUM_BLOCKS)
    for pages in cache.layers:
        pages.k.fill_(NEVER_WRITTEN)
        pages.v.fill_(NEVER_WRITTEN)
    failures: list[BaseException] = []
    engine = Engine(
        model=model,
        cache=cache,
        scheduler=PrefillScheduler(pool, BLOCK_SIZE, CHUNK_TOKENS),
        sample=launch_sample,
        device=CPU,
        max_batch_size=8,
        loop=asyncio.get_running_loop(),
        on_failure=failures.append,
        counts_prompt_tokens=True,
        overlap=overlap,
    )
    bench = Bench(engine, cache, pool, failures=failures)
    try:
        yield bench
    finally:
        for sequence, mailbox in bench.open:
            engine.release(sequence, mailbox)
        assert await asyncio.to_thread(engine.stop, 20)
    assert not failures
    await asyncio.sleep(0)
    assert engine._layers._pipe is None


async def first_token(mailbox: Mailbox) -> None:
    while not any(isinstance(event, TokenEvent) for event in await mailbox.take()):
        pass


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told of, however small it is."""
    monkeypatch.setattr(layer_reports, "REPORT_BYTES", 1)


def plant_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's report comes a layer too soon."""
    note = LayerReports.note
    monkeypatch.setattr(LayerReports, "note", lambda self, layer: note(self, layer + 1))


async def claims_of(
    model: Model, monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> tuple[Bench, list[Claim]]:
    """All prompts together; the pages are copied by the forward pass itself, at each report."""
    claims: list[Claim] = []
    note_progress = layer_reports.note_progress
    async with running(model, overlap=overlap) as bench:
        slots = torch.arange(bench.cache.layers[0].k.shape[0])

        def note(counter: Tensor, number: int, wake_fd: int) -> None:
            # Perhaps only recorded: what will be said when it runs.
            now = int(counter[0])
            counter[0] = number
            rows = [[p.available(i) for i in range(p.num_layers)] for p in bench.progresses]
            counter[0] = now
            note_progress(counter, number, wake_fd)
            pages = [(layer.k.flatten(1), layer.v.flatten(1)) for layer in bench.cache.layers]
            copies = [(torch.empty_like(k), torch.empty_like(v)) for k, v in pages]
            for sources, targets in zip(pages, copies, strict=True):
                for source, target in zip(sources, targets, strict=True):
                    take_rows(source, slots, target)
            claims.append(Claim(rows, copies))

        monkeypatch.setattr(layer_reports, "note_progress", note)
        mailboxes = [bench.submit(random_tokens(length))[1] for length in LENGTHS]
        bench.engine.start()
        await asyncio.gather(*map(first_token, mailboxes))
        for progress in bench.progresses:
            layers = range(progress.num_layers)
            assert [progress.available(i) for i in layers] == [progress.num_tokens for _ in layers]
    return bench, claims


def num_wrong(bench: Bench, claims: list[Claim]) -> int:
    """Rows that were claimed and were not, or not yet, what they are now."""
    wrong = 0
    for claim in claims:
        for progress, counts in zip(bench.progresses, claim.rows, strict=True):
            for layer, count in enumerate(counts):
                if count == 0:
                    continue
                slots = bench.slots(progress)[:count]
                pages = bench.cache.layers[layer]
                for then, now in zip(claim.pages[layer], (pages.k, pages.v), strict=True):
                    wrong += int((then[slots] != now.flatten(1)[slots]).any(1).sum())
    return wrong


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("every_layer")
async def test_what_is_told_is_there(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> None:
    use_path(path, monkeypatch)
    model = build(make_model(family))
    bench, claims = await claims_of(model, monkeypatch, overlap=overlap)
    num_layers = model.config.num_layers
    # 40 tokens of the first; 30 and 10 of the second; its 11, the third and 28; the last 5.
    assert len(claims) == 4 * num_layers
    assert [claim.rows[0] for claim in claims[: num_layers + 1]] == [
        *([40] * layer + [0] * (num_layers - layer) for layer in range(1, num_layers + 1)),
        [70] + [40] * (num_layers - 1),
    ]
    assert claims[2 * num_layers].rows == [
        [70] * num_layers,
        [21] + [10] * (num_layers - 1),
        [1] + [0] * (num_layers - 1),
        [28] + [0] * (num_layers - 1),
    ]
    assert num_wrong(bench, claims) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("every_layer")
async def test_a_report_that_comes_too_early_is_seen(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    plant_too_early(monkeypatch)
    bench, claims = await claims_of(build(make_model("llama")), monkeypatch, overlap=False)
    assert num_wrong(bench, claims) > sum(LENGTHS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("every_layer")
async def test_a_reader_beside_the_engine_gets_the_final_rows(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    async with running(build(make_model(family))) as bench:
        readers = [
            asyncio.create_task(bench.read(bench.submit(random_tokens(length))[0], lambda: None))
            for length in LENGTHS
        ]
        bench.engine.start()
        read = await asyncio.wait_for(asyncio.gather(*readers), 60)
        for progress, layers in zip(bench.progresses, read, strict=True):
            for layer, rows in enumerate(layers):
                assert torch.equal(rows, bench.rows(progress, layer, 0, progress.num_tokens))
                assert not (rows == NEVER_WRITTEN).all(-1).any()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("every_layer")
async def test_a_reader_is_woken_within_the_step(
    monkeypatch: pytest.MonkeyPatch, *, early: bool
) -> None:
    """The engine waits at each report until the reader was there."""
    use_path("portable", monkeypatch)
    if early:
        plant_too_early(monkeypatch)
    model = build(make_model("llama"))
    note_progress = layer_reports.note_progress
    passed = threading.Event()
    num_reports = 0

    def note(counter: Tensor, number: int, wake_fd: int) -> None:
        nonlocal num_reports
        if number > model.config.num_layers:
            return  # planted
        passed.clear()
        note_progress(counter, number, wake_fd)
        assert passed.wait(20), "nobody was woken"
        num_reports += 1

    monkeypatch.setattr(layer_reports, "note_progress", note)
    async with running(model) as bench:
        progress, mailbox = bench.submit(random_tokens(37))
        reader = asyncio.create_task(bench.read(progress, passed.set))
        bench.engine.start()
        await first_token(mailbox)
        read = await asyncio.wait_for(reader, 20)
        same = [
            torch.equal(rows, bench.rows(progress, layer, 0, 37)) for layer, rows in enumerate(read)
        ]
    assert num_reports == model.config.num_layers - early
    assert all(same) is not early


async def test_small_layers_are_told_of_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(make_model("llama", num_hidden_layers=5))
    row = 2 * model.config.num_kv_heads * model.config.head_dim * 4
    monkeypatch.setattr(layer_reports, "REPORT_BYTES", 2 * 20 * row)
    numbers: list[int] = []
    note_progress = layer_reports.note_progress

    def note(counter: Tensor, number: int, wake_fd: int) -> None:
        numbers.append(number)
        note_progress(counter, number, wake_fd)

    monkeypatch.setattr(layer_reports, "note_progress", note)
    async with running(model) as bench:
        bench.engine.start()
        # What nobody waits for does not count.
        mailboxes = [bench.submit(random_tokens(20))[1], bench.submit_with([1] * 20, None)]
        await asyncio.gather(*map(first_token, mailboxes))
        assert numbers == [2, 4]
        assert [bench.progresses[0].available(layer) for layer in range(5)] == [20] * 5


async def test_the_end_of_a_step_wakes_too() -> None:
    """These are too small to be told of on the way."""
    async with running(build(make_model("llama"))) as bench:
        bench.engine.start()
        for length in (1, 20, 90):
            progress, _ = bench.submit(random_tokens(length))
            read = await asyncio.wait_for(bench.read(progress, lambda: None), 20)
            for layer, rows in enumerate(read):
                assert torch.equal(rows, bench.rows(progress, layer, 0, length))


async def test_without_a_reader_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(counter: Tensor, number: int, wake_fd: int) -> None:
        raise AssertionError("told of layers that nobody waits for")

    monkeypatch.setattr(layer_reports, "REPORT_BYTES", 1)
    monkeypatch.setattr(layer_reports, "note_progress", note)
    async with running(build(make_model("llama"))) as bench:
        bench.engine.start()
        await first_token(bench.submit_with(random_tokens(50), None))
        # A single token is a captured pass, as in decode: told of at its end alone.
        progress, mailbox = bench.submit([3])
        await first_token(mailbox)
        assert [progress.available(layer) for layer in range(3)] == [1, 1, 1]


async def test_a_worker_that_can_open_no_more_files_still_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    async with running(build(make_model("llama"))) as bench:
        monkeypatch.setattr(os, "pipe", full)
        bench.engine.start()
        progress, _ = bench.submit(random_tokens(20))
        read = await asyncio.wait_for(bench.read(progress, lambda: None), 20)
        for layer, rows in enumerate(read):
            assert torch.equal(rows, bench.rows(progress, layer, 0, 20))


@pytest.mark.usefixtures("every_layer")
async def test_cached_rows_are_there_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(70)
    async with running(build(make_model("llama"))) as bench:
        bench.engine.start()
        await first_token(bench.submit_with(prompt, None, cached=True))
        seen: list[list[int]] = []
        note_progress = layer_reports.note_progress
        progress = KvProgress(3, 70)

        def note(counter: Tensor, number: int, wake_fd: int) -> None:
            if number == 1:
                seen.append([progress.available(layer) for layer in range(3)])
            note_progress(counter, number, wake_fd)

        monkeypatch.setattr(layer_reports, "note_progress", note)
        bench.progresses.append(progress)
        await first_token(bench.submit_with(prompt, progress, cached=True))
        assert seen == [[64, 64, 64]]
        assert [progress.available(layer) for layer in range(3)] == [70, 70, 70]


def started(pool: BlockPool, num_tokens: int, num_computed: int) -> Sequence:
    found = pool.acquire([], -(-num_tokens // BLOCK_SIZE))
    assert found is not None
    sequence = Sequence(
        [1] * num_tokens,
        num_tokens,
        SamplingParams.greedy_for(4),
        frozenset(),
        num_computed=num_computed,
        lease=BlockLease(pool, found[0]),
        progress=KvProgress(2, num_tokens),
    )
    sequence.move_to(SequenceState.RUNNING)
    return sequence


async def test_cached_rows_wait_for_the_step_under_way_that_may_write_them() -> None:
    """On a device a block can be found while the step that fills it is still on its way."""
    shape = KvShape(2, 8, 1024, BLOCK_SIZE, torch.float32)  # every layer is told of
    signal = LayerSignal(shape, CPU, asyncio.get_running_loop())
    signal.open()
    pool = BlockPool(NUM_BLOCKS)
    first, second = started(pool, 32, 0), started(pool, 40, 32)
    assert first.progress is not None
    assert second.progress is not None
    for progress in (first.progress, second.progress):
        signal.add(progress)

    def launch(sequence: Sequence, before: Flight | None) -> Flight:
        step = Step([StepPart(sequence, len(sequence.token_ids) - sequence.num_computed)])
        reports, watched = signal.begin(step, before)
        return Flight(step, [], None, [], 0.0, 0.0, reports, watched)

    flight = launch(first, None)
    assert flight.reports is not None
    flight.reports.note(0)
    following = launch(second, flight)
    assert following.reports is not None
    assert [second.progress.available(layer) for layer in range(2)] == [32, 0]
    flight.reports.note(1)
    following.reports.note(0)
    assert [second.progress.available(layer) for layer in range(2)] == [40, 32]
    signal.end(flight)
    assert [first.progress.available(layer) for layer in range(2)] == [32, 32]
    assert [second.progress.available(layer) for layer in range(2)] == [40, 32]
    signal.end(following)
    assert [second.progress.available(layer) for layer in range(2)] == [40, 40]
    pipe = signal._pipe
    assert pipe is not None
    signal.close()
    for end in pipe:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
    signal.close()  # again: nothing


async def test_one_released_before_its_step_never_begins() -> None:
    async with running(build(make_model("llama"))) as bench:
        progress, mailbox = bench.submit(random_tokens(30))
        sequence, _ = bench.open.pop()
        bench.engine.release(sequence, mailbox)
        bench.engine.start()
        await first_token(bench.submit(random_tokens(20))[1])
        assert progress.lease is None
        assert progress.available(0) == 0
        assert bench.engine._layers._listeners == {bench.progresses[1]}
