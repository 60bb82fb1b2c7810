"""What a router tells the controller of its load, and what its status says of the autoscaler."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_worker import FakeWorker
from router_service import Service, ask, collect, until

from legato.protos import cluster_pb2


async def test_a_router_tells_its_windows_and_workers_once_a_second() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", total_blocks=50)
    async with Service([prefill], [decode], reports_load=True) as service:
        await collect(service, ask("hello", 6))
        await collect(service, ask("hello", 9, batch=True))
        loads = service.control.loads
        await until(lambda: bool(loads) and loads[-1].window.num_tokens > 0)
        load = loads[-1]
        # A batch request has no goal, and does not count.
        assert (load.window.num_first_tokens, load.window.num_tokens) == (1, 5)
        assert 0 < load.window.ttft_p90_s < 5
        assert 0 < load.window.itl_mean_s < 5
        assert load.router_id
        assert (load.queued_for_prefill, load.queued_for_decode) == (0, 0)
        told = {worker.role: worker for worker in load.workers}
        assert told["prefill"].worker_id == service.endpoints[0].worker_id
        assert (told["decode"].total_blocks, told["decode"].used_blocks) == (50, 0)
        num_reports = len(loads)
        await until(lambda: len(loads) > num_reports)
        assert loads[-1].router_id == load.router_id


async def test_the_queue_counts_for_the_pool_that_it_waits_for() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode", total_blocks=8)
    async with Service([prefill], [decode], reports_load=True) as service:
        loads = service.control.loads
        decode.faults.hold_joining = True
        asking = [asyncio.create_task(collect(service, ask("x" * 12, 12))) for _ in range(6)]
        await until(lambda: bool(loads) and loads[-1].queued_for_decode > 0)
        load = loads[-1]
        assert (load.queued_for_prefill, load.queued_prefill_tokens) == (0, 0)
        assert load.queued_decode_blocks > load.queued_for_decode
        decode.faults.hold_joining = False
        await asyncio.gather(*asking)
        await until(lambda: loads[-1].queued_for_decode == 0)


async def test_a_controller_that_takes_no_report_disturbs_nobody() -> None:
    async with Service(
        [FakeWorker("prefill")], [FakeWorker("decode")], reports_load=True
    ) as service:
        service.control.failing = True
        await until(lambda: service.control.num_failed > 0)
        assert (await collect(service, ask("hello", 4))).token_ids
        service.control.failing = False
        await until(lambda: bool(service.control.loads))


async def test_without_autoscaling_nothing_is_told_and_nothing_shown() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        await collect(service, ask("hello", 4))
        await asyncio.sleep(1.2)
        assert service.control.loads == []
        assert not (await service.client.status()).HasField("autoscaler")


async def test_status_has_what_the_controller_says_of_the_autoscaler() -> None:
    async with Service(
        [FakeWorker("prefill")], [FakeWorker("decode")], reports_load=True
    ) as service:
        service.control.autoscaler_told = cluster_pb2.AutoscalerStatus(
            dry_run=True,
            decisions=[cluster_pb2.ScalingDecision(age_s=3, text="decode 1 -> 2: it is so")],
        )
        status = await service.client.status()
        assert status.autoscaler == service.control.autoscaler_told
        service.control.failing = True
        assert not (await service.client.status()).HasField("autoscaler")


async def test_a_size_that_the_controller_refuses_is_the_callers_fault() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        service.control.scale_refusal = "decode is 4, limit [1, 3]: it is autoscaled"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await service.client.scale({"decode": 4})
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == "targets[0].target is 4, limit [1, 3]: it is autoscaled"
