"""KV that does not get from a prefill to a decode worker while the router hears both."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Service, ask, collect, expected, until

from legato.cluster import path_policies


def workers(num_prefills: int, num_decodes: int) -> tuple[list[FakeWorker], list[FakeWorker]]:
    """The first prefill worker is the one that is picked where both are idle."""
    prefills = [FakeWorker("prefill") for _ in range(num_prefills)]
    prefills.sort(key=lambda worker: worker.worker_id)
    return prefills, [FakeWorker("decode") for _ in range(num_decodes)]


def ids(pool: list[FakeWorker]) -> set[str]:
    return {worker.worker_id for worker in pool}


def failed(service: Service) -> dict[str, int]:
    """Requests that count against a worker."""
    views = service.router.pool.views()
    return {v.worker_id: len(v.failed_requests) for v in views if v.failed_requests}


async def error_of(service: Service, name: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(service, ask(name, 10))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    return raised.value.details() or ""


async def reopen(service: Service) -> None:
    """As if the time were over in which paths that failed are not used; all have reported since."""
    service.router.pool.paths._closed_until.clear()
    await until(lambda: not any(view.full for view in service.router.pool.views()))


async def test_one_path_that_is_cut_costs_nobody_his_good_name() -> None:
    [prefill], decodes = workers(1, 2)
    prefill.faults.out_of_reach = {decodes[0].worker_id}
    async with Service([prefill], decodes) as service:
        for number in range(12):
            if number % 3 == 0:
                await reopen(service)
            result = await collect(service, ask(f"request {number}", 10))
            assert result.token_ids == expected(f"request {number}", 10)
            assert result.finish.timings.prefill_forwards == 1
        assert len(prefill.prefills) == 12
        # Asked once at most by those that come while the path is closed.
        assert 1 <= len(prefill.retargets) <= 4
        assert len(decodes[0].reserves) == len(prefill.retargets)
        assert failed(service) == {}
        await asyncio.sleep(0.1)
        assert service.control.lost == []
        await service.settle()


async def test_the_other_prefill_worker_reaches_that_decode_worker() -> None:
    prefills, decodes = workers(2, 1)
    prefills[0].faults.out_of_reach = ids(decodes)
    async with Service(prefills, decodes) as service:
        result = await collect(service, ask("hello", 10))
        assert result.token_ids == expected("hello", 10)
        assert (result.finish.timings.attempts, result.finish.timings.retargets) == (2, 0)
        assert result.finish.timings.prefill_worker == prefills[1].worker_id
        for number in range(4):
            await collect(service, ask(f"next {number}", 3))
        assert len(prefills[0].prefills) == 1  # its only path is closed
        await service.settle()


@pytest.mark.parametrize("how", ["out of reach", "refused"])
async def test_a_prefill_worker_that_is_cut_off_is_lost_in_the_end(how: str) -> None:
    prefills, decodes = workers(2, 2)
    bad = prefills[0]
    if how == "refused":
        bad.faults.refused_by = ids(decodes)
    else:
        bad.faults.out_of_reach = ids(decodes)
    async with Service(prefills, decodes) as service:
        for number in range(3):
            assert service.control.lost == []
            assert failed(service) == ({bad.worker_id: number} if number else {})
            result = await collect(service, ask(f"request {number}", 30))
            assert result.token_ids == expected(f"request {number}", 30)
            timings = result.finish.timings
            assert (timings.attempts, timings.retargets) == (3, 1)
            assert timings.prefill_worker == prefills[1].worker_id
            await reopen(service)
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [bad.worker_id]
        assert len(service.router.pool.placeable("decode")) == 2
        await service.settle()


async def test_a_decode_worker_that_refuses_what_another_takes_is_lost_in_the_end() -> None:
    [prefill], decodes = workers(1, 2)
    bad = min(decodes, key=lambda worker: worker.worker_id)
    prefill.faults.refused_by = {bad.worker_id}
    async with Service([prefill], decodes) as service:
        for number in range(3):
            assert service.control.lost == []
            result = await collect(service, ask(f"request {number}", 10))
            assert result.token_ids == expected(f"request {number}", 10)
            assert result.finish.timings.retargets == 1
            await reopen(service)
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [bad.worker_id]
        await service.settle()


@pytest.mark.parametrize("num_prefills", [1, 2])
@pytest.mark.parametrize("num_decodes", [1, 3])
async def test_where_no_path_is_left_nobody_is_blamed(num_prefills: int, num_decodes: int) -> None:
    prefills, decodes = workers(num_prefills, num_decodes)
    for worker in prefills:
        worker.faults.out_of_reach = ids(decodes)
    async with Service(prefills, decodes) as service:
        for number in range(5):
            details = await error_of(service, f"request {number}")
            assert any(worker.worker_id in details for worker in prefills)
            assert any(worker.worker_id in details for worker in decodes)
            assert "Connection refused" in details
        assert failed(service) == {}
        await asyncio.sleep(0.1)
        assert service.control.lost == []
        await service.settle()
        for worker in prefills:
            worker.faults.out_of_reach.clear()
        assert (await collect(service, ask("hello", 5))).token_ids == expected("hello", 5)


async def test_time_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path_policies.NO_WAY_S == 5.0
    monkeypatch.setattr(path_policies, "NO_WAY_S", 0.0)
    [prefill], [decode] = workers(1, 1)
    prefill.faults.out_of_reach = {decode.worker_id}
    async with Service([prefill], [decode]) as service:
        details = await error_of(service, "hello")
        assert "its KV gets to no decode worker" in details
        assert prefill.worker_id in details
        assert decode.worker_id in details
        assert prefill.retargets == []
        await service.settle()


async def test_what_others_say_is_told_as_one_clean_line() -> None:
    [prefill], [decode] = workers(1, 1)
    prefill.faults.refused_by = {decode.worker_id}
    async with Service([prefill], [decode]) as service:
        details = await error_of(service, "hello")
        assert details.isprintable()
        assert "kv_wire is 'int8'\\x00\\x1b[31m" in details
        await service.settle()


async def test_kv_that_stopped_coming_is_not_the_decode_workers_failure() -> None:
    [prefill], decodes = workers(1, 2)
    prefill.faults.hold_handoff = True
    lapses = ["whichever comes first"]
    for worker in decodes:
        worker.faults.lapses = lapses
    async with Service([prefill], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 10)))
        await until(lambda: bool(prefill.retargets))
        assert not lapses
        prefill.faults.hold_handoff = False
        result = await reading
        assert result.token_ids == expected("hello", 10)
        assert len(prefill.prefills) == 1
        assert failed(service) == {}
        await service.settle()


async def test_a_prefill_worker_that_fails_at_the_hand_off_is_blamed_itself() -> None:
    [prefill], decodes = workers(1, 2)
    prefill.faults.fail_handoffs = 100
    async with Service([prefill], decodes, max_attempts=1) as service:
        for number in range(3):
            await error_of(service, f"request {number}")
        await until(lambda: bool(service.control.lost))
        assert [worker_id for worker_id, _ in service.control.lost] == [prefill.worker_id]
        assert failed(service).keys() <= {prefill.worker_id}
        await service.settle()
