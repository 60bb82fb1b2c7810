"""One trace from the client over router, prefill, hand-off and decode, in an OTLP collector."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_engine import FakeModel
from fake_worker import FakeWorker
from otlp_collector import FAILED, OtlpCollector, attributes_of
from router_service import (
    FakeAnswerText,
    FakeControl,
    FakeText,
    Service,
    ask,
    collect,
    fake_parse,
    until,
)
from typer.testing import CliRunner
from worker_pair import Worker, running_worker, sampling

from legato.cluster.cli.app import build_app
from legato.cluster.config import RouterOptions
from legato.cluster.control_plane import WorkerEndpoint
from legato.cluster.router import Router
from legato.protos import generation_pb2, generation_pb2_grpc, tracing
from legato.protos.tracing import Tracing, read_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from torch import Tensor

    from legato.cluster.control_plane import Role

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
TRACED = f"00-{TRACE_ID}-{CALLER_ID}-01"
NOT_TRACED = f"00-{TRACE_ID}-{CALLER_ID}-00"
PHASES = ["queue", "ticket", "prefill", "handoff", "decode", "delivery"]
PROMPT = list(range(1, 12))


@pytest.fixture(autouse=True)
def spans_leave_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is dropped because a busy machine keeps the collector waiting."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 20.0)
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_MS", 20_000)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request lives long enough for what is done to its worker."""
    quick = FakeModel.next_token

    def next_token(self: FakeModel, rows: Tensor) -> int:
        time.sleep(0.005)
        return quick(self, rows)

    monkeypatch.setattr(FakeModel, "next_token", next_token)


class NoEosText(FakeText):
    eos_token_ids = ()  # type: ignore[assignment]  # the fake engine's vocabulary is small


class Rig:
    """A router and real workers around fake models, all in this process, and their collector."""

    def __init__(self, collector: OtlpCollector, router: Router, address: str) -> None:
        self.collector = collector
        self.router = router
        self.address = address
        self.workers: list[tuple[Worker, WorkerEndpoint]] = []

    async def ask(self, num_tokens: int, traceparent: str | None = TRACED) -> list[int]:
        metadata = None if traceparent is None else (("traceparent", traceparent),)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT), sampling=sampling(num_tokens)
        )
        token_ids: list[int] = []
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationStub(channel)
            async for response in stub.Generate(request, timeout=30, metadata=metadata):
                token_ids += response.delta.token_ids
        assert len(token_ids) == num_tokens
        return token_ids

    def of_role(self, role: Role) -> list[Worker]:
        return [w for w, endpoint in self.workers if endpoint.role == role]

    async def busy_decoder(self) -> Worker:
        """That has decoded some tokens of the only request."""
        decoders = self.of_role("decode")
        await until(lambda: any(w.load().decode_tokens > 8 for w in decoders))
        [busy] = [w for w in decoders if w.load().decode_tokens]
        return busy


@asynccontextmanager
async def traced(num_decoders: int = 1, **options: Any) -> AsyncIterator[Rig]:  # noqa: ANN401
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(OtlpCollector())
        router = Router(
            RouterOptions(
                port=0, local_prefill_tokens=0, otlp_endpoint=collector.address, **options
            ),
            NoEosText(),  # type: ignore[arg-type]  # what the router uses of it
            FakeControl(),
            model_name="fake-model",
            version="0",
            owner_pid=7,
            owner_host="here",
            parse=fake_parse,
            new_answer=FakeAnswerText,
        )
        rig = Rig(collector, router, await router.start())
        stack.push_async_callback(router.stop)
        roles: Sequence[Role] = ("prefill", *["decode"] * num_decoders)  # type: ignore[list-item]
        for role in roles:
            worker = await stack.enter_async_context(
                running_worker(role, num_blocks=256, otlp_endpoint=collector.address)
            )
            endpoint = WorkerEndpoint(worker.server.worker_id, role, worker.address)
            rig.workers.append((worker, endpoint))
        await router.set_workers([endpoint for _, endpoint in rig.workers])
        await until(lambda: router.ready)
        yield rig


async def test_one_trace_joins_client_router_prefill_handoff_and_decode() -> None:
    async with traced() as rig:
        await rig.ask(12)
        collector = rig.collector
        await collector.until(15)
    assert collector.trace_ids() == {bytes.fromhex(TRACE_ID)}
    [root] = collector.named("text_completion fake-model", "legato-router")
    assert root.parent_span_id.hex() == CALLER_ID
    prefill_call, decode_call = "legato.v1.PrefillWorker/Prefill", "legato.v1.DecodeWorker/Decode"
    children = collector.children(root)
    assert [name for name in children if name in PHASES] == PHASES
    assert sorted({*children} - {*PHASES}) == [decode_call, prefill_call]
    [prefill] = collector.named("prefill", "legato-prefill")
    [decode] = collector.named("decode", "legato-decode")
    assert collector.parent(prefill).name == prefill_call
    assert collector.parent(decode).name == decode_call
    assert collector.children(prefill) == ["compute", "kv send"]
    assert collector.children(decode) == ["kv receive", "steps"]
    [sent] = collector.named("kv send")
    assert attributes_of(sent)["legato.kv_bytes"] > 0
    told = attributes_of(root)
    assert told["gen_ai.usage.output_tokens"] == 12
    assert told["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert told["legato.outcome"] == "completed"
    assert root.status.code != FAILED
    for _, span in collector.spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    phases = [s for name in PHASES for s in collector.named(name, "legato-router")]
    ends = [span.end_time_unix_nano for span in phases]
    assert [s.start_time_unix_nano for s in phases[1:]] == ends[:-1], "without a gap"


@pytest.mark.usefixtures("slow_steps")
async def test_a_move_is_in_the_same_trace() -> None:
    async with traced(num_decoders=2) as rig:
        asking = asyncio.create_task(rig.ask(300))
        source = await rig.busy_decoder()
        [target] = [w for w in rig.of_role("decode") if w is not source]
        source.server._begin_drain()
        await asking
        collector = rig.collector
        await collector.until(20)
    assert collector.trace_ids() == {bytes.fromhex(TRACE_ID)}
    [root] = collector.named("text_completion fake-model")
    [moved] = [event for event in root.events if event.name == "moved"]
    assert attributes_of(moved)["legato.worker"] == target.server.worker_id
    first, second = collector.named("decode", "legato-decode")
    assert "kv send" in collector.children(first), "the source sends its KV"
    assert collector.children(second) == ["kv receive", "steps"]
    for call in (first, second):
        assert collector.parent(collector.parent(call)).span_id == root.span_id
    assert len(collector.named("prefill", "legato-prefill")) == 1


@pytest.mark.usefixtures("slow_steps")
async def test_a_replay_is_in_the_same_trace_with_the_loss_and_its_reason() -> None:
    async with traced(num_decoders=2) as rig:
        asking = asyncio.create_task(rig.ask(300))
        lost = await rig.busy_decoder()
        await lost.server.stop(0)
        await asking
        collector = rig.collector
        await collector.until(28)
    assert collector.trace_ids() == {bytes.fromhex(TRACE_ID)}
    [root] = collector.named("text_completion fake-model")
    events = {event.name: attributes_of(event) for event in root.events}
    assert events["attempt ended"]["legato.reason"] == "worker_failed"
    assert events["attempt ended"]["legato.worker"] == lost.server.worker_id
    assert events["replayed"]["legato.tokens"] > 8
    assert len(collector.named("prefill", "legato-prefill")) == 2
    assert attributes_of(root)["legato.attempts"] == 2
    phases = [name for name in collector.children(root) if name in PHASES]
    assert phases == [*PHASES[:-1], *PHASES]
    calls = collector.named("legato.v1.DecodeWorker/Decode")
    assert [call.status.code == FAILED for call in calls] == [True, False]


async def test_a_request_that_fails_says_why() -> None:
    async with OtlpCollector() as collector:
        options = {"otlp_endpoint": collector.address}
        async with Service([FakeWorker("prefill")], [FakeWorker("decode")], **options) as service:
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(service, ask("x" * 500, 5))
        [(_, root)] = collector.spans
    assert root.status.code == FAILED
    assert attributes_of(root)["error.type"] == "invalid_field"


@pytest.mark.parametrize(
    ("traceparent", "share", "is_traced"),
    [(None, 0.0, False), (None, 1.0, True), (NOT_TRACED, 1.0, False), (TRACED, 0.0, True)],
)
async def test_the_client_decides_and_else_the_share(
    traceparent: str | None, share: float, is_traced: bool
) -> None:
    async with traced(trace_share=share) as rig:
        await rig.ask(3, traceparent)
        if is_traced:
            await rig.collector.until(15)
    assert bool(rig.collector.spans) is is_traced
    assert len(rig.collector.trace_ids()) == is_traced


async def test_a_collector_that_is_away_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_MS", 3000)
    async with Service(
        [FakeWorker("prefill")], [FakeWorker("decode")], otlp_endpoint="127.0.0.1:9"
    ) as service:
        await collect(service, ask("hello", 5))
        await service.settle()
        assert service.router.counters.completed == 1


def test_nothing_is_imported_where_no_collector_is_named() -> None:
    code = (
        "import sys, legato.cluster.router, legato.worker.server, legato.cluster.cli.main\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'legato\[otlp\]'"):
        Tracing("127.0.0.1:4317", service="x", instance="y")


def test_an_endpoint_is_read() -> None:
    assert read_endpoint("collector:4317") == "http://collector:4317"
    assert read_endpoint("https://collector:4317/") == "https://collector:4317"
    for wrong in ("collector", "ftp://collector:1", "http://collector:1/v1/traces", "x:y", ""):
        with pytest.raises(ValueError, match="host:port"):
            read_endpoint(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--otlp-endpoint", "collector"], "host:port"),
        (["--otlp-endpoint", "collector:4317", "--trace-share", "1.5"], "--trace-share"),
    ],
)
def test_the_command_refuses_what_cannot_be_traced(words: list[str], said: str) -> None:
    result = CliRunner().invoke(build_app(), ["serve", "--model", "demo", *words])
    assert result.exit_code == 2
    assert said in result.output


def test_the_command_names_the_missing_extra_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    words = ["serve", "--model", "demo", "--otlp-endpoint", "collector:4317"]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 2
    assert "legato[otlp]" in result.output.replace("\n", "")
