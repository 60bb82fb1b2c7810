from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from fake_worker import FakeWorker
from owners import check_owners
from router_service import Service, ask, collect, collect_all, until

from legato.cluster.request_log import RequestLog
from legato.cluster.worker_view import ViewState
from legato.protos import common_pb2

if TYPE_CHECKING:
    from pathlib import Path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_a_path_nothing_is_written() -> None:
    RequestLog(None).note("received", request="a")


def test_lines_are_whole_and_at_once_and_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for moment in (1.5, 2.5):
        log = RequestLog(str(path), now=iter((moment,)).__next__)
        log.note("ended", request='a"\n', outcome="completed")
        assert lines(path)[-1] == {
            "at_s": moment,
            "router": os.getpid(),
            "event": "ended",
            "request": 'a"\n',
            "outcome": "completed",
        }
        log.close()
        log.note("ended", request="b")
    assert len(lines(path)) == 2


def test_a_path_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        RequestLog(str(tmp_path / "absent" / "log"))


def test_long_lines_of_several_routers_do_not_tear(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def write(router: int) -> None:
        log = RequestLog(str(path))
        for number in range(50):
            log.note("ended", request=f"{router} {number}", reason="x" * 50_000)
        log.close()

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, range(4)))
    told = lines(path)
    for router in range(4):
        mine = [line["request"] for line in told if line["request"].startswith(f"{router} ")]
        assert mine == [f"{router} {number}" for number in range(50)]


def test_a_line_that_is_not_taken_whole_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = RequestLog(str(path))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        log.note("ended", reason="x" * 200)
        log.note("ended")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == 100
    assert "it took 100 of a line's" in caplog.text
    log.note("ended")
    assert path.stat().st_size == 100


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full")
    log.note("received")
    log.note("received")
    assert caplog.text.count("no more lines to the request log /dev/full") == 1


async def test_a_life_with_a_loss_is_told_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    decodes = [FakeWorker("decode", step_s=0.005) for _ in range(2)]
    prefill = FakeWorker("prefill")
    async with Service([prefill], decodes, request_log=str(path)) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        await until(lambda: any(worker.num_tokens_sent > 4 for worker in decodes))
        victim = next(worker for worker in decodes if worker.num_tokens_sent)
        other = next(worker for worker in decodes if worker is not victim)
        await victim.die()
        await reading
        told = lines(path)
    of_request = [line for line in told if "request" in line]
    assert len({line["request"] for line in of_request}) == 1
    phases = ["queue", "ticket", "prefill", "handoff", "decode"]
    assert [line.get("phase", line["event"]) for line in of_request] == [
        "received",
        "queue",
        "begun",
        *phases[1:],
        "left",
        "queue",
        "begun",
        *phases[1:],
        "delivery",
        "left",
        "ended",
    ]
    first, second = (line for line in of_request if line["event"] == "begun")
    assert (first["prefill"], first["decode"]) == (prefill.worker_id, victim.worker_id)
    assert (second["prefill"], second["decode"]) == (prefill.worker_id, other.worker_id)
    assert first["attempt"] != second["attempt"]
    lost_at, end = (line["tokens"] for line in of_request if line["event"] == "left")
    assert 4 < lost_at < end == 60
    assert of_request[-1]["outcome"] == "completed"
    states = [line["state"] for line in told if line.get("worker") == victim.worker_id]
    assert states[:2] == ["ready", "lost"]
    assert [line["at_s"] for line in told] == sorted(line["at_s"] for line in told)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_that_goes_as_asked_is_not_called_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, busy: bool
) -> None:
    path = tmp_path / "log"
    decodes = [FakeWorker("decode", step_s=0.01) for _ in range(2)]
    with caplog.at_level(logging.INFO, "legato.cluster.pool_view"):
        async with Service([FakeWorker("prefill")], decodes, request_log=str(path)) as service:
            reading = asyncio.create_task(collect(service, ask("hello", 60)))
            await until(lambda: any(worker.num_tokens_sent > 4 for worker in decodes))
            victim = next(w for w in decodes if bool(w.num_tokens_sent) is busy)
            victim.faults.hold_parking = True
            victim.phase = common_pb2.WORKER_PHASE_DRAINING
            view = service.router.pool.view(victim.worker_id)
            assert view is not None
            await until(view.departing.is_set)
            await victim.die()
            await until(lambda: view.state is not ViewState.READY)
            await reading
            told = lines(path)
    states = [line["state"] for line in told if line.get("worker") == victim.worker_id]
    assert states[:3] == ["ready", "draining", "lost" if busy else "left"]
    [said] = [r for r in caplog.records if "left as asked" in r.message or " lost: " in r.message]
    assert said.levelno == (logging.WARNING if busy else logging.INFO)


async def test_how_it_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", step_s=0.01)
    async with Service([prefill], [decode], request_log=str(path), max_attempts=1) as service:
        await collect_all(service, ask("hello", 4, n=2))
        stream = service.client.generate(ask("cancelled", 200), timeout_s=20)
        await anext(stream)
        await stream.aclose()
        await service.settle()
        decode.step_s = 0.1  # slower than it was: what was expected to be in time is not
        with pytest.raises(Exception, match=r"deadline|DEADLINE"):
            await collect(service, ask("late", 20), timeout_s=0.6)
        await service.settle()
        prefill.faults.fail_prefills = 1
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await collect(service, ask("unlucky", 4))
        await service.settle()
    outcomes = [line["outcome"] for line in lines(path) if line["event"] == "ended"]
    assert outcomes[:2] == ["completed", "cancelled"]
    assert outcomes[2] in ("deadline", "cancelled")  # the client may be the first to notice
    assert outcomes[3:] == ["failed"]
    (reason,) = [line["reason"] for line in lines(path) if line.get("outcome") == "failed"]
    assert "failed 1 times (limit 1)" in reason
    received = [line for line in lines(path) if line["event"] == "received"]
    assert [line["answers"] for line in received] == [2, 1, 1, 1]


async def test_answers_that_a_colocated_worker_serves_one_by_one_leave_each_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    async with Service([], [FakeWorker("colocated")], request_log=str(path)) as service:
        await service.client.wait_ready(5)
        await collect_all(service, ask("hello", 6, n=3))
        await service.settle()
    told = lines(path)
    assert check_owners(told, {}) == []
    assert len([line for line in told if line["event"] == "begun"]) > 3


async def test_answers_that_go_on_alone_are_retargeted_each_in_its_own_attempt(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    prefill = FakeWorker("prefill")
    decodes = [FakeWorker("decode", step_s=0.005) for _ in range(3)]
    async with Service([prefill], decodes, request_log=str(path)) as service:
        reading = asyncio.create_task(collect_all(service, ask("hello", 60, n=2)))
        await until(lambda: any(worker.num_tokens_sent > 8 for worker in decodes))
        prefill.faults.hold_handoff = True
        victim = next(worker for worker in decodes if worker.num_tokens_sent)
        decodes.remove(victim)
        await victim.die()
        await until(lambda: sum(len(worker.starts) for worker in decodes) == 2)
        victim = next(worker for worker in decodes if worker.starts)
        decodes.remove(victim)
        await victim.die()
        await until(lambda: bool(prefill.retargets))
        prefill.faults.hold_handoff = False
        await reading
        await service.settle()
    told = lines(path)
    assert [line for line in told if line["event"] == "retargeted"]
    assert check_owners(told, {}) == []
