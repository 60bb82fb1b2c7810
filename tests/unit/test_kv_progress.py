"""KvProgress alone, told by hand: what is available when, and when a wait ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from legato.worker import layer_reports
from legato.worker.kv.block_lease import BlockLease
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.progress import KvProgress
from legato.worker.layer_reports import LayerReports

if TYPE_CHECKING:
    from legato.worker.layer_reports import LayerReports as Reports

NUM_LAYERS = 4


@dataclass
class FakeReports:
    name: str
    num_done: int = 0

    def after(self, layer: int) -> object:
        return f"{self.name}{layer}"


def reports(name: str = "step") -> tuple[FakeReports, Reports]:
    fake = FakeReports(name)
    return fake, cast("Reports", fake)


def rows(progress: KvProgress) -> list[int]:
    return [progress.available(layer) for layer in range(NUM_LAYERS)]


def test_layers_of_a_step_under_way_have_its_rows() -> None:
    progress = KvProgress(NUM_LAYERS, 30)
    assert rows(progress) == [0, 0, 0, 0]
    progress.found(8)
    fake, told = reports()
    progress.begin(20, told)
    assert rows(progress) == [8, 8, 8, 8]
    fake.num_done = 2
    assert rows(progress) == [28, 28, 8, 8]
    progress.end()
    assert rows(progress) == [28, 28, 28, 28]
    progress.begin(2, None)
    assert rows(progress) == [28, 28, 28, 28]
    progress.end()
    assert rows(progress) == [30, 30, 30, 30]


def test_two_steps_under_way_count_in_their_order() -> None:
    progress = KvProgress(NUM_LAYERS, 30)
    (first, told_first), (second, told_second) = reports("a"), reports("b")
    progress.begin(20, told_first)
    progress.begin(10, told_second)
    first.num_done = 3
    second.num_done = 4  # the last layer of the first was not told of
    assert rows(progress) == [30, 30, 30, 0]
    assert [progress.after(layer) for layer in range(NUM_LAYERS)] == ["b0", "b1", "b2", None]
    progress.end()
    assert rows(progress) == [30, 30, 30, 30]
    assert progress.after(3) == "b3"
    progress.end()
    assert progress.after(3) is None


def test_of_a_computed_sequence_all_is_there() -> None:
    pool = BlockPool(4)
    found = pool.acquire([], 2)
    assert found is not None
    lease = BlockLease(pool, found[0])
    progress = KvProgress.complete(lease, NUM_LAYERS, 30)
    assert progress.lease is lease
    assert rows(progress) == [30, 30, 30, 30]


async def test_a_wait_ends_with_what_is_new_and_only_then() -> None:
    progress = KvProgress(NUM_LAYERS, 30)
    fake, told = reports()

    async def ends(wait: asyncio.Task[None]) -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        return wait.done()

    wait = asyncio.create_task(progress.changed())
    progress.tell()
    assert not await ends(wait)
    progress.begin(30, told)
    progress.tell()
    assert await ends(wait)
    for change in (lambda: setattr(fake, "num_done", 2), progress.end):
        wait = asyncio.create_task(progress.changed())
        progress.tell()
        assert not await ends(wait)
        change()
        progress.tell()
        assert await ends(wait)
    progress.begin(1, None)
    progress.end()
    progress.tell()  # before anybody waits: it is not lost
    await asyncio.wait_for(progress.changed(), 5)


@pytest.mark.parametrize(
    ("layer_bytes", "numbers"),
    [(1 << 20, [1, 2, 3, 4]), (256 << 10, [1, 2, 3, 4]), (200 << 10, [2, 4]), (100 << 10, [3])],
)
def test_so_many_layers_are_told_of_at_once(
    layer_bytes: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def note(counter: torch.Tensor, number: int, wake_fd: int) -> None:
        del wake_fd
        counter[0] = number
        told.append(number)

    monkeypatch.setattr(layer_reports, "note_progress", note)
    reports = LayerReports(layer_bytes, 0, torch.device("cpu"))
    for layer in range(NUM_LAYERS):
        reports.note(layer)
        assert reports.num_done == (told[-1] if told else 0)
        assert reports.after(layer) is None
    assert told == numbers


def test_on_a_device_each_report_has_an_event_recorded_before_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []

    class FakeEvent:
        def record(self) -> None:
            log.append(self)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(
        layer_reports, "note_progress", lambda counter, number, wake_fd: log.append(number)
    )
    reports = LayerReports(128 << 10, 0, torch.device("cuda"))
    for layer in range(NUM_LAYERS):
        reports.note(layer)
    first, _, second, _ = log
    assert log == [first, 2, second, 4]
    assert [reports.after(layer) for layer in range(NUM_LAYERS)] == [first, first, second, second]
