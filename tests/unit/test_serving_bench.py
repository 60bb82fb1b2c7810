from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from legato.bench import serving
from legato.bench.serving import Load, Sample, run_load, summarise
from legato.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def sample(sent_s: float, *times_s: float, says: int | None = None) -> Sample:
    usage = generation_pb2.Usage(completion_tokens=len(times_s) if says is None else says)
    timings = generation_pb2.Timings(prefill_s=0.5, kv_bytes_handed_over=10, attempts=1)
    finish = generation_pb2.Finish(usage=usage, timings=timings)
    return Sample(sent_s=sent_s, token_times_s=list(times_s), finish=finish)


def test_figures() -> None:
    result: dict[str, Any] = summarise([sample(0.0, 1.0, 2.0, 3.0), sample(1.0, 2.0, 3.0, 4.0)], 2)
    assert (result["requests"], result["failed"]) == (2, 0)
    assert result["ttft_s"] == {"p50": 1.0, "p99": 1.0, "max": 1.0}
    assert result["itl_s"] == {"p50": 1.0, "p99": 1.0, "max": 1.0}
    # Both streams run from 2 to 3; the one token each that comes after 2 is counted.
    assert result["output_tokens_per_s"] == 2.0
    assert result["server_prefill_s"]["p50"] == 0.5
    assert result["kv_bytes_handed_over"] == 20


@pytest.mark.parametrize(
    "bad",
    [
        Sample(sent_s=0.0, error="UNAVAILABLE: x"),
        sample(0.0, 1.0, says=2),  # a token was lost on the way
        Sample(sent_s=0.0, token_times_s=[1.0]),  # no finish
    ],
)
def test_a_run_with_a_failure_has_no_figures(bad: Sample) -> None:
    result = summarise([sample(0.0, 1.0, 2.0), bad], 1)
    assert result["failed"] == 1
    assert result["errors"]
    assert "ttft_s" not in result
    assert "output_tokens_per_s" not in result


def test_without_a_common_window_there_is_no_rate() -> None:
    assert summarise([sample(0.0, 1.0), sample(2.0, 3.0)], 2)["output_tokens_per_s"] is None


class Counting(generation_pb2_grpc.GenerationServicer):
    """Answers three tokens; knows how many calls ran at once."""

    def __init__(self) -> None:
        self.num_calls = self.running = self.most = 0

    async def Generate(  # type: ignore[override]  # noqa: N802  # aio's form, gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.num_calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        for index in range(request.sampling.max_tokens):
            await asyncio.sleep(0.01)
            delta = generation_pb2.Delta(token_ids=[index], token_offset=index)
            yield generation_pb2.GenerateResponse(delta=delta)
        self.running -= 1
        yield generation_pb2.GenerateResponse(
            finish=generation_pb2.Finish(
                usage=generation_pb2.Usage(completion_tokens=request.sampling.max_tokens)
            )
        )


async def test_every_request_is_sent_once_and_no_more_at_a_time_than_asked() -> None:
    servicer, server = Counting(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        load = Load(f"127.0.0.1:{port}", 3, 7, prompt_tokens=4, max_tokens=3, timeout_s=30)
        samples = await run_load(load)
    finally:
        await server.stop(0)
    assert (servicer.num_calls, servicer.most) == (7, 3)
    assert [len(s.token_times_s) for s in samples] == [3] * 7
    assert all(s.ok for s in samples)


async def test_an_unreachable_service_is_a_failure_not_a_figure() -> None:
    samples = await run_load(Load("127.0.0.1:1", 1, 1, 4, 3, timeout_s=5))
    assert not samples[0].ok
    assert summarise(samples, 1)["errors"]


@pytest.mark.parametrize("value", ["0", "99999999999"])
def test_a_setting_out_of_range_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["serving", "--address", "127.0.0.1:1", "--max-tokens", value])
    with pytest.raises(SystemExit, match="2"):
        serving.main()
    assert f"--max-tokens must be in [1, 2147483647], got {value}" in capsys.readouterr().err
