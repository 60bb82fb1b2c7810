"""What `/metrics` tells of a router over fake workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from fake_worker import FakeWorker
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from router_service import Service, ask, collect, collect_all, until

from legato.cluster.attempt_errors import AttemptEndedError
from legato.cluster.metrics.catalogue import METRICS, TTFT_BOUNDS_S
from legato.cluster.metrics.exposition import exposition
from legato.cluster.metrics.request_record import _ENDED
from legato.cluster.metrics.tallies import Spread
from legato.cluster.worker_view import ViewState
from legato.protos import cluster_pb2, common_pb2

if TYPE_CHECKING:
    from legato.cluster.router import Router

SECRET = "the-prompt-of-somebody"


class Scrape:
    """One reading, by sample name and labels."""

    def __init__(self, router: Router) -> None:
        body, content_type = exposition(router)
        assert content_type.startswith("text/plain")
        self.text = body.decode()
        self.samples = [s for family in parse(self.text) for s in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels; at least one must be there."""
        found = [
            s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(s.labels) for s in self.samples if s.name == name]


async def test_a_finished_request_is_told_with_its_times_and_tokens() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode", step_s=0.002)]) as service:
        await collect(service, ask(SECRET, 20))
        await service.settle()
        scrape = Scrape(service.router)
    assert scrape.value("legato_requests_total", outcome="completed", priority="interactive") == 1
    assert scrape.value("legato_answers_total", finish_reason="length") == 1
    assert scrape.value("legato_prompt_tokens_total") == len(SECRET)
    assert scrape.value("legato_generated_tokens_total") == 20
    assert scrape.value("legato_time_to_first_token_seconds_count", priority="interactive") == 1
    gaps = scrape.value("legato_inter_token_latency_seconds_count", priority="interactive")
    assert gaps == 19, "each token but the first has its gap"
    assert 19 * 0.001 < scrape.value("legato_inter_token_latency_seconds_sum") < 5
    assert scrape.value("legato_time_per_output_token_seconds_count") == 1
    for phase in ("queue", "ticket", "prefill", "handoff", "decode", "delivery"):
        assert scrape.value("legato_phase_seconds_count", phase=phase) == 1
    parts = scrape.value("legato_phase_seconds_sum")
    whole = scrape.value("legato_request_duration_seconds_sum", outcome="completed")
    assert 0 < parts <= whole
    assert scrape.value("legato_handoffs_total") == 1
    assert scrape.value("legato_handoff_bytes_total") > 0
    assert scrape.value("legato_requests_in_flight") == 0
    assert scrape.value("legato_ready") == 1


async def test_the_conventions_metrics_have_their_labels_and_bounds() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        await collect(service, ask("hello", 5))
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(service, ask("x" * 500, 5))
        port = service.address.rpartition(":")[2]
        scrape = Scrape(service.router)
    labels = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "legato",
        "gen_ai_request_model": "fake-model",
        "gen_ai_response_model": "fake-model",
        "server_address": "127.0.0.1",
        "server_port": port,
    }
    name = "gen_ai_server_time_to_first_token_seconds"
    assert scrape.labels(f"{name}_count") == [labels]
    bounds = [row["le"] for row in scrape.labels(f"{name}_bucket")]
    assert bounds == [*map(str, TTFT_BOUNDS_S), "+Inf"]
    assert scrape.labels("gen_ai_server_time_per_output_token_seconds_count") == [labels]
    durations = scrape.labels("gen_ai_server_request_duration_seconds_count")
    assert {row["error_type"] for row in durations} == {"", "invalid_field"}


async def test_what_is_refused_fails_or_is_cancelled_has_its_reason() -> None:
    decode = FakeWorker("decode", step_s=0.02, total_blocks=30)
    options = {"max_queued_requests": 1, "default_deadline_s": 0.1}
    async with Service([FakeWorker("prefill")], [decode], **options) as service:
        router = service.router
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(service, ask("x" * 500, 5))
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(service, ask("hello", 50), timeout_s=None)
        await service.settle()
        running = asyncio.create_task(collect(service, ask("x" * 72, 40)))
        await until(lambda: decode.num_tokens_sent > 4 and decode.used_blocks > 16)
        waiting = asyncio.create_task(collect(service, ask("y" * 72, 5, batch=True)))
        await until(lambda: router.admission.num_queued == 1)
        scrape = Scrape(router)
        assert scrape.value("legato_queue_requests", priority="batch") == 1
        assert scrape.value("legato_queue_prompt_tokens") == 72
        assert scrape.value("legato_queue_oldest_seconds") >= 0
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(service, ask("z" * 72, 5, batch=True))
        for task in (waiting, running):
            task.cancel()
        await asyncio.wait({waiting, running})
        await service.settle()
        scrape = Scrape(router)
    assert scrape.value("legato_refusals_total", reason="invalid_field") == 1
    assert scrape.value("legato_refusals_total", reason="overloaded") == 1
    assert scrape.value("legato_failures_total", reason="deadline_passed") == 1
    assert scrape.value("legato_requests_total", outcome="refused") == 2
    assert scrape.value("legato_requests_total", outcome="failed") == 1
    assert scrape.value("legato_requests_total", outcome="cancelled") == 2
    counters = router.counters
    assert (counters.refused, counters.failed, counters.cancelled) == (2, 1, 2)


async def test_several_answers_and_batch_are_counted_apart() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        await collect_all(service, ask("hello", 6, n=3, batch=True))
        scrape = Scrape(service.router)
    assert scrape.value("legato_answers_total") == 3
    assert scrape.value("legato_generated_tokens_total") == 18
    assert scrape.value("legato_time_to_first_token_seconds_count", priority="batch") == 3
    assert scrape.value("legato_requests_total", priority="batch") == 1


async def test_a_lost_worker_is_counted_and_its_series_vanish() -> None:
    decodes = [FakeWorker("decode", step_s=0.01) for _ in range(2)]
    async with Service([FakeWorker("prefill")], decodes) as service:
        reading = asyncio.create_task(collect(service, ask("hello", 60)))
        await until(lambda: any(worker.num_tokens_sent > 4 for worker in decodes))
        [source] = [worker for worker in decodes if worker.open_calls]
        before = Scrape(service.router)
        assert before.value("legato_worker_running", worker=source.worker_id) >= 0
        await source.die()
        await reading
        view = service.router.pool.view(source.worker_id)
        assert view is not None
        await until(lambda: view.state is ViewState.LOST)
        scrape = Scrape(service.router)
        assert scrape.value("legato_attempts_ended_total", reason="worker_failed") == 1
        assert scrape.value("legato_replays_total") == 1
        assert scrape.value("legato_replayed_tokens_total") > 4
        assert scrape.value("legato_pool_workers", role="decode", state="lost") == 1
        assert scrape.value("legato_pool_workers", role="decode", state="ready") == 1
        kept = [e for e in service.endpoints if e.worker_id != source.worker_id]
        await service.router.set_workers(kept)
        assert source.worker_id in before.text
        assert source.worker_id not in Scrape(service.router).text


async def test_a_worker_tells_all_of_its_report() -> None:
    prefill, decode = FakeWorker("prefill"), FakeWorker("decode")
    async with Service([prefill], [decode]) as service:
        await until(lambda: all(v.load is not None for v in service.router.pool.views()))
        view = service.router.pool.view(decode.worker_id)
        assert view is not None
        load = common_pb2.WorkerLoad()
        for number, field in enumerate(load.DESCRIPTOR.fields, start=1):
            setattr(load, field.name, number)
        view.load = load
        scrape = Scrape(service.router)
        told = [
            s.value
            for s in scrape.samples
            if s.name.startswith("legato_worker_") and s.labels["worker"] == decode.worker_id
        ]
    # What a local prefill costs is the router's own concern; the age of the report is no field.
    fields = {float(f.number) for f in load.DESCRIPTOR.fields} - {27.0}
    assert fields <= {*told}
    assert len(told) == len(fields) + 1
    assert scrape.value("vllm:kv_cache_usage_perc") == (load.reserved_blocks + load.held_blocks) / (
        load.total_blocks
    )
    assert scrape.value("vllm:gpu_cache_usage_perc") == scrape.value("vllm:kv_cache_usage_perc")
    assert scrape.value("vllm:num_requests_running") >= load.running
    assert scrape.value("vllm:num_requests_waiting") >= load.waiting
    assert scrape.labels("vllm:cache_config_info")[0]["block_size"] == "4"


async def test_the_controllers_word_on_pools_and_autoscaler() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")], reports_load=True) as s:
        decode = common_pb2.WORKER_ROLE_DECODE
        s.control.told = [cluster_pb2.PoolStatus(role=decode, target=5)]
        s.control.autoscaler_told = cluster_pb2.AutoscalerStatus(
            num_decisions=7, pools=[cluster_pb2.AutoscaledPool(role=decode, needed=4)]
        )
        await s.router.pool_poll.ask()
        scrape = Scrape(s.router)
        assert scrape.value("legato_pool_target_workers", role="decode") == 5
        assert scrape.value("legato_autoscaler_decisions_total") == 7
        assert scrape.value("legato_autoscaler_needed_workers", role="decode") == 4
        assert scrape.value("legato_controller_answers") == 1
        s.control.failing = True
        await s.router.pool_poll.ask()
        scrape = Scrape(s.router)
        assert scrape.value("legato_controller_answers") == 0
        assert scrape.labels("legato_pool_target_workers") == []


async def test_no_text_and_no_request_id_is_ever_told() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        result = await collect(service, ask(SECRET, 20, request_id="some-request"))
        text = Scrape(service.router).text
    assert SECRET not in text
    assert "some-request" not in text
    assert result.text not in text


async def test_each_router_has_its_own() -> None:
    async with (
        Service([FakeWorker("prefill")], [FakeWorker("decode")]) as one,
        Service([FakeWorker("prefill")], [FakeWorker("decode")]) as other,
    ):
        await collect(one, ask("hello", 5))
        assert Scrape(one.router).value("legato_generated_tokens_total") == 5
        assert Scrape(other.router).value("legato_generated_tokens_total") == 0


async def test_all_of_the_catalogue_and_the_process_are_exported_in_both_formats() -> None:
    async with Service([FakeWorker("prefill")], [FakeWorker("decode")]) as service:
        body, content_type = exposition(service.router, "application/openmetrics-text")
        assert content_type.startswith("application/openmetrics-text")
        families = {family.name: family for family in parse_openmetrics(body.decode())}
        text = Scrape(service.router).text
    assert {metric.name for metric in METRICS} <= families.keys()
    for metric in METRICS:
        assert families[metric.name].type == metric.kind
        assert metric.name in text
    assert "process_resident_memory_bytes" in text


def test_a_value_is_counted_under_each_bound_that_it_is_not_above() -> None:
    spread = Spread((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        spread.add(value)
    spread.add(2.0, times=3)
    assert spread.buckets() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert spread.sum == 0.5 + 1.0 + 1.5 + 9.0 + 6.0
    assert spread.count == 7


def test_every_way_in_which_an_attempt_ends_has_a_word() -> None:
    assert {kind.__name__ for kind in AttemptEndedError.__subclasses__()} == _ENDED.keys()


def test_names_and_labels_are_well_formed_and_bounded() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len({*names})
    ours = {label for metric in METRICS for label in metric.labels}
    # Of these alone the values are not written in this repository.
    open_ended = {"worker", "model", "version", "model_name", "block_size", "num_gpu_blocks"}
    closed = {"outcome", "priority", "reason", "finish_reason", "phase", "role", "state"}
    closed |= {"kind", "result", "event"}
    conventions = {label for label in ours if label.startswith(("gen_ai_", "server_"))}
    assert ours - open_ended - closed - conventions == {"error_type"}
    assert all(metric.help.endswith(".") for metric in METRICS)
