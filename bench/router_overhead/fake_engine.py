"""The fake engine's process: a prefill and a decode worker that compute nothing.

    python -m legato.bench.router_overhead.fake_engine --times FILE --streams N --tokens N

Started by `python -m legato.bench.router_overhead`; prints one line when it is ready, and ends with
its standard input. Every token is a message of its own, as of an engine whose every step is
delivered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from legato.bench.router_overhead.inner_access import add_options, inner_access
from legato.bench.router_overhead.send_times import SendTimes
from legato.bench.router_overhead.stream_name import StreamName
from legato.protos import common_pb2, worker_pb2, worker_pb2_grpc
from legato.protos.malformed import RefuseMalformed
from legato.protos.protocol_version import PROTOCOL_VERSION
from legato.protos.refuse_strangers import RefuseStrangers
from legato.worker.channel import SERVER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK_SIZE = 16
TOTAL_BLOCKS = 1 << 20
VOCAB_SIZE = 49152
TOKEN_IDS = tuple(range(1000, 1064))  # ordinary words of the demo model's vocabulary
REPORT_S = 0.5


class FakeEngine(
    worker_pb2_grpc.PrefillWorkerServicer,
    worker_pb2_grpc.DecodeWorkerServicer,
    worker_pb2_grpc.WorkerControlServicer,
):
    """One worker. Tokens leave by the clock that the stream's name tells; see `StreamName`."""

    def __init__(self, role: common_pb2.WorkerRole.ValueType, times: SendTimes | None) -> None:
        self.worker_id = f"fake-{common_pb2.WorkerRole.Name(role).lower()}"
        self._role = role
        self._times = times
        self._epochs = itertools.count(1)

    async def Prefill(  # noqa: N802  # named by the proto
        self,
        request_iterator: AsyncIterator[worker_pb2.PrefillCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        """The first token at once, and a hand-off of nothing."""
        await anext(request_iterator)
        first = worker_pb2.FirstToken(prefill_forwards=1)
        first.answers.add(token=worker_pb2.SampledToken(token_id=TOKEN_IDS[0], index=0))
        yield worker_pb2.PrefillEvent(first_token=first)
        yield worker_pb2.PrefillEvent(handoff_done=worker_pb2.HandoffDone())

    async def Decode(  # noqa: N802  # named by the proto
        self,
        request_iterator: AsyncIterator[worker_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        """A ticket, then tokens 1, 2, … up to max_tokens."""
        reserve = (await anext(request_iterator)).reserve
        name = StreamName.parse(reserve.key.request_id)
        yield worker_pb2.DecodeEvent(
            ticket=worker_pb2.KvTicket(
                key=reserve.key, epoch=next(self._epochs), worker_id=self.worker_id, blocks=1
            )
        )
        await anext(request_iterator)
        yield worker_pb2.DecodeEvent(joined=worker_pb2.Joined())
        assert self._times is not None, "the decode worker has it"
        sent_s = self._times.seconds[name.number]
        num_tokens = reserve.sampling.max_tokens
        for index in range(1, num_tokens):
            event = worker_pb2.DecodeEvent(
                tokens=worker_pb2.Tokens(
                    tokens=[
                        worker_pb2.SampledToken(
                            token_id=TOKEN_IDS[index % len(TOKEN_IDS)], index=index
                        )
                    ],
                    decode_forwards=index,
                )
            )
            if index == num_tokens - 1:
                event.tokens.finished = True
                event.tokens.finish_reason = common_pb2.FINISH_REASON_LENGTH
            if name.period_us:
                await _until_turn(name)
            sent_s[index] = time.monotonic()
            yield event

    async def GetIdentity(  # noqa: N802  # named by the proto
        self,
        request: worker_pb2.GetIdentityRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.WorkerIdentity:
        """See worker.proto."""
        return worker_pb2.WorkerIdentity(
            worker_id=self.worker_id,
            role=self._role,
            model_fingerprint="fake",
            dtype="float32",
            weights="float32",
            kv_wire="same",
            kv_layout=worker_pb2.KvLayout(
                num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32"
            ),
            total_blocks=TOTAL_BLOCKS,
            context_length=1 << 20,
            vocab_size=VOCAB_SIZE,
            architecture="fake",
            protocol_version=PROTOCOL_VERSION,
        )

    async def WatchLoad(  # noqa: N802  # named by the proto
        self,
        request: worker_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        """Always free."""
        while True:
            yield worker_pb2.WorkerReport(
                phase=common_pb2.WORKER_PHASE_READY,
                load=common_pb2.WorkerLoad(total_blocks=TOTAL_BLOCKS, free_blocks=TOTAL_BLOCKS),
            )
            await asyncio.sleep(REPORT_S)

    async def Drain(  # noqa: N802  # named by the proto
        self,
        request: worker_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.DrainResponse:
        """There is nothing to wait for."""
        return worker_pb2.DrainResponse()


async def _until_turn(name: StreamName) -> None:
    period_s, phase_s = name.period_us / 1e6, name.phase_us / 1e6
    left_s = (phase_s - time.monotonic()) % period_s
    # What is nearly over is the turn that was just served: its timer may ring a little early.
    await asyncio.sleep(left_s if left_s > period_s / 10 else left_s + period_s)


async def _serve(args: argparse.Namespace) -> None:
    times = SendTimes(args.times, args.streams, args.tokens, create=True)
    servers, ready = [], {}
    access = inner_access(args.certs, "worker", args.secret)
    for role, name in (
        (common_pb2.WORKER_ROLE_PREFILL, "prefill"),
        (common_pb2.WORKER_ROLE_DECODE, "decode"),
    ):
        engine = FakeEngine(role, times if name == "decode" else None)
        server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[RefuseStrangers(access), RefuseMalformed()]
        )
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(engine, server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(engine, server)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(engine, server)
        port = access.add_port(server, "127.0.0.1:0")
        await server.start()
        servers.append(server)
        ready[name] = {"worker_id": engine.worker_id, "address": f"127.0.0.1:{port}"}
    gc.freeze()
    print(json.dumps(ready), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    for server in servers:
        await server.stop(0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    add_options(parser)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
