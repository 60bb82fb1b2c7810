"""CannedService: a service that answers two words, and Runner, which runs commands against it."""

from __future__ import annotations

import sys
import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc
import pytest

from legato.cluster.cli import main as cli
from legato.protos import (
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


class CannedService(cluster_pb2_grpc.ClusterServicer, generation_pb2_grpc.GenerationServicer):
    """Answers two words; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.targets = {PREFILL: 1, DECODE: 1}
        self.ready = True
        self.has_template = True
        self.hangs_before: int | None = None  # which token
        self.refusal = ""  # what is wrong with every request
        self.drain_timeout_s: float | None = None
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def GetModel(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(has_chat_template=self.has_template)

    def Generate(  # noqa: N802  # gRPC's spelling
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.sampling.temperature < 0:
            self.refusal = "sampling.temperature is -1, limit [0, 100]"
        if self.refusal:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        for index, word in enumerate(("two ", "wörds")):
            if index == self.hangs_before:
                ended = threading.Event()
                if context.add_callback(ended.set):
                    ended.wait(20)
                return
            for other in range(max(1, request.n)):
                delta = generation_pb2.Delta(
                    text=f"{other or ''}{word}", token_ids=[index], token_offset=index
                )
                start = generation_pb2.StreamStart(seed=7, max_tokens=2, model_fingerprint="f")
                yield generation_pb2.GenerateResponse(
                    request_id=request.request_id,
                    start=start if index == other == 0 else None,
                    delta=delta,
                    index=other,
                )
        for other in reversed(range(max(1, request.n))):
            yield generation_pb2.GenerateResponse(
                request_id=request.request_id,
                finish=generation_pb2.Finish(
                    finish_reason=common_pb2.FINISH_REASON_STOP,
                    usage=generation_pb2.Usage(
                        prompt_tokens=3, completion_tokens=2, seed=7 + other
                    ),
                    timings=generation_pb2.Timings(
                        ttft_s=0.5, prefill_forwards=1, decode_forwards=1
                    ),
                ),
                index=other,
            )

    def GetStatus(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetStatusResponse:
        pools = [
            cluster_pb2.PoolStatus(role=role, target=target, ready=1)
            for role, target in self.targets.items()
        ]
        pools[1].message = "" if self.ready else "0 of 1 ready; waiting for 1 GPU"
        worker = pools[1].workers.add(worker_id="decode-0123456789abcdef", role=DECODE)
        load = worker.load
        load.total_blocks, load.free_blocks, load.reserved_blocks = 1000, 600, 90
        load.cached_blocks, load.held_blocks = 250, 310
        load.running, load.waiting, load.swapped = 11, 12, 13
        load.preemptions, load.preemptions_returned = 1400, 15
        load.swap_held_blocks, load.swap_total_blocks = 16, 1700
        load.kv_bytes_sent, load.kv_bytes_sent_by_memory = 3 * 10**9, 225 * 10**7
        load.prefix_blocks_asked, load.prefix_blocks_hit = 1800, 450
        return cluster_pb2.GetStatusResponse(
            model="m", ready=self.ready, pools=pools, owner_host="elsewhere", owner_pid=1
        )

    def ScalePool(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ScalePoolRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ScalePoolResponse:
        self.targets |= {target.role: target.target for target in request.targets}
        return cluster_pb2.ScalePoolResponse(
            targets=[cluster_pb2.PoolTarget(role=r, target=t) for r, t in self.targets.items()]
        )

    def Shutdown(  # noqa: N802  # gRPC's spelling
        self, request: cluster_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.ShutdownResponse:
        self.drain_timeout_s = request.drain_timeout_s
        self.server.stop(0.2)
        return cluster_pb2.ShutdownResponse()


class Runner:
    """Runs `legato …` with the service's port; returns the exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        self._monkeypatch = monkeypatch
        self.port = port

    def __call__(self, *words: str) -> int:
        return self.bare(*words, "--port", str(self.port))

    def bare(self, *words: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["legato", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)
