"""The bare relay's process: the router's place in the data path, and nothing else done.

    python -m legato.bench.router_overhead.relay --decode HOST:PORT

Speaks the same two protocols with the same library and options as the router: takes Generate, opens
a Decode call, and for each message that comes from there parses it and writes one to the client.
Started by `python -m legato.bench.router_overhead`; prints one line when it is ready, and ends with
its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from typing import Any

import grpc

from legato.cluster.gateway import SERVER_OPTIONS
from legato.protos import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from legato.worker.channel import CHANNEL_OPTIONS


class Relay(generation_pb2_grpc.GenerationServicer):
    """Passes on."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._decode: worker_pb2_grpc.DecodeWorkerAsyncStub = worker_pb2_grpc.DecodeWorkerStub(
            channel
        )

    async def Generate(  # type: ignore[override]  # noqa: N802  # writes; named by the proto
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One Decode call, from its reservation to its last token."""
        call: Any = self._decode.Decode(timeout=context.time_remaining())
        reserve = worker_pb2.Reserve(
            key=worker_pb2.AttemptKey(request_id=request.request_id), sampling=request.sampling
        )
        await call.write(worker_pb2.DecodeCommand(reserve=reserve))
        await call.read()
        await call.write(worker_pb2.DecodeCommand(start=worker_pb2.Start()))
        await call.read()
        while True:
            event = await call.read()
            tokens = event.tokens
            delta = generation_pb2.Delta(
                token_ids=[token.token_id for token in tokens.tokens],
                token_offset=tokens.tokens[0].index,
            )
            await context.write(
                generation_pb2.GenerateResponse(delta=delta, request_id=request.request_id)
            )
            if tokens.finished:
                break
        call.cancel()
        finish = generation_pb2.Finish(finish_reason=common_pb2.FINISH_REASON_LENGTH)
        await context.write(
            generation_pb2.GenerateResponse(finish=finish, request_id=request.request_id)
        )

    async def GetModel(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.GetModelResponse:
        """There is none."""
        return generation_pb2.GetModelResponse(name="relay")

    async def Tokenize(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.TokenizeResponse:
        """Not measured."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the relay has no tokenizer")
        raise AssertionError("abort always raises")

    async def Detokenize(  # noqa: N802  # named by the proto
        self,
        request: generation_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generation_pb2.DetokenizeResponse:
        """Not measured."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the relay has no tokenizer")
        raise AssertionError("abort always raises")


async def _serve(args: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(args.decode, options=CHANNEL_OPTIONS) as channel:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServicer_to_server(Relay(channel), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        gc.freeze()
        print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        await server.stop(0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
