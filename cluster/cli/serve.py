"""`legato serve`: starts a service and stays until it is told to end."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from legato.cluster.cli.connection import CALL_TIMEOUT_S, DEFAULT_PORT, connect
from legato.cluster.cli.kv_capacity import kv_lines
from legato.cluster.cli.memory_size import parse_fraction, parse_size, parse_size_or_0
from legato.cluster.cli.pool_options import check_pools
from legato.cluster.cli.progress import TerminalProgress
from legato.cluster.config import KV_WIRES, WEIGHTS, EngineOptions, RouterOptions, ServiceConfig
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.config import Admission, KvLane
    from legato.cluster.owner import Owner


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, a hub id, a .gguf file, or `demo` for the demo model."
        ),
    ],
    prefill: Annotated[int, typer.Option(min=1, max=1024, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=1024, help="Decode workers.")] = 1,
    host: Annotated[
        str, typer.Option(help="Where clients reach it. There is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes any free one.")
    ] = DEFAULT_PORT,
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Routers, at --port and those that follow it. Clients that are told all of "
            "their addresses go on at another when one dies.",
        ),
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Join a running Ray cluster: host:port, or `auto` for the one of this machine. "
            "Without it, a Ray of its own is started.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto is cuda where Ray has GPUs.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache: Annotated[
        str,
        typer.Option(
            help="auto, fp8 or int8: 8 bits an element of K and V, for up to twice or four times "
            "the tokens; auto is the weights' dtype."
        ),
    ] = "auto",
    decode_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the decode workers, where it is not --dtype; with a --kv-wire.",
            show_default=False,
        ),
    ] = None,
    decode_kv_cache: Annotated[
        str | None,
        typer.Option(
            help="Of the decode workers, where it is not --kv-cache; with a --kv-wire.",
            show_default=False,
        ),
    ] = None,
    kv_lane: Annotated[
        str,
        typer.Option(
            help="auto: KV goes through shared memory between workers of one machine; grpc: never."
        ),
    ] = "auto",
    kv_wire: Annotated[
        str,
        typer.Option(
            help="What KV is sent as between workers: same (as it is held), float32, bfloat16, "
            "float16, or int8 or fp8 with a scale a head."
        ),
    ] = "same",
    weights: Annotated[
        str,
        typer.Option(
            help="Of the matrices: auto, keep (GGUF's blocks as they are), int8, int4, "
            "or int4-g64, -g128, -g64-sym, -g128-sym."
        ),
    ] = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The same bits for a request alone and in company on CUDA too, at some speed.",
        ),
    ] = False,
    kv_memory: Annotated[
        str,
        typer.Option(
            help="KV cache of each worker: a size (4GiB, or plain bytes), or a number in (0, 1] "
            "without a unit: that fraction of what is free after the weights and a step, shared "
            "by the workers on one machine or GPU."
        ),
    ] = "1GiB",
    swap_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each decode worker for the KV of preempted sequences; 0 is off. "
            "Default: as much as its KV cache, at most a quarter of the machine's memory.",
            show_default=False,
        ),
    ] = None,
    admission: Annotated[
        str,
        typer.Option(
            help="expected: a sequence enters where its expected answer fits beside the others'; "
            "reserve: where its max_tokens do, and nobody is preempted."
        ),
    ] = EngineOptions.admission,
    admission_risk: Annotated[
        float,
        typer.Option(help="The share of answers, in [0, 1), that may get longer than expected."),
    ] = EngineOptions.admission_risk,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Lower than the model's own.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of each worker. Default: the cores, divided by the workers."),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 256,
    prefill_chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of a prefill step.")
    ] = 2048,
    prefix_cache: Annotated[
        bool,
        typer.Option(help="Keep the KV of prompts' beginnings while there is room."),
    ] = True,
    local_prefill_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Up to so many tokens of a prompt that a decode worker has no KV of, it computes "
            "itself where that is measured to cost less than the hand-off; 0 is off.",
        ),
    ] = RouterOptions.local_prefill_tokens,
    worker_host: Annotated[
        str,
        typer.Option(
            help="Where workers listen. auto: loopback, or each node's address in a cluster."
        ),
    ] = "auto",
    worker_cpus: Annotated[
        float | None,
        typer.Option(min=0, help="Ray CPUs of a worker. Default: 1 in a joined cluster."),
    ] = None,
    worker_gpus: Annotated[
        float | None, typer.Option(min=0, help="Ray GPUs of a worker. Default: 1 on cuda.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until every worker must be ready.")
    ] = 120.0,
) -> None:
    """Start a service and stay until Ctrl-C or `legato stop`.

    Examples:

        legato serve --model demo

        legato serve --model ./my-model --prefill 1 --decode 2 --kv-memory 4GiB

        legato serve --model org/name --ray-address auto --device cuda
    """
    if kv_lane not in ("auto", "grpc"):
        raise typer.BadParameter(f"must be auto or grpc, got {kv_lane!r}", param_hint="--kv-lane")
    if kv_wire not in KV_WIRES:
        raise typer.BadParameter(
            f"must be one of {', '.join(KV_WIRES)}, got {kv_wire!r}", param_hint="--kv-wire"
        )
    if weights not in WEIGHTS:
        raise typer.BadParameter(
            f"must be one of {', '.join(WEIGHTS)}, got {weights!r}", param_hint="--weights"
        )
    check_pools((dtype, kv_cache), (decode_dtype, decode_kv_cache), kv_wire, weights)
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise typer.BadParameter(
            f"must be auto, cpu or cuda, got {device!r}", param_hint="--device"
        )
    if admission not in ("expected", "reserve"):
        raise typer.BadParameter(
            f"must be expected or reserve, got {admission!r}", param_hint="--admission"
        )
    if not 0 <= admission_risk < 1:
        raise typer.BadParameter(
            f"must be in [0, 1), got {admission_risk}", param_hint="--admission-risk"
        )
    kv_memory_fraction = parse_fraction(kv_memory, "--kv-memory")
    kv_memory_bytes = EngineOptions.kv_memory_bytes
    if kv_memory_fraction is None:
        kv_memory_bytes = parse_size(kv_memory, "--kv-memory", ", or a fraction in (0, 1]")
    swap_memory_bytes = None
    if swap_memory is not None:
        swap_memory_bytes = parse_size_or_0(swap_memory, "--swap-memory")
    config = ServiceConfig(
        model=model,
        prefill_workers=prefill,
        decode_workers=decode,
        num_routers=routers,
        ray_address=ray_address,
        worker_host=worker_host,
        worker_cpus=worker_cpus,
        worker_gpus=worker_gpus,
        start_timeout_s=start_timeout,
        engine=EngineOptions(
            device=device,
            dtype=dtype,
            kv_cache=kv_cache,
            kv_lane=cast("KvLane", kv_lane),
            kv_wire=kv_wire,
            deterministic=deterministic,
            weights=weights,
            kv_memory_bytes=kv_memory_bytes,
            kv_memory_fraction=kv_memory_fraction,
            swap_memory_bytes=swap_memory_bytes,
            admission=cast("Admission", admission),
            admission_risk=admission_risk,
            block_size=block_size,
            prefill_chunk_tokens=prefill_chunk_tokens,
            prefix_cache=prefix_cache,
            max_batch_size=max_batch_size,
            context_length=context_length,
            num_threads=threads,
        ),
        decode_dtype=decode_dtype,
        decode_kv_cache=decode_kv_cache,
        router=RouterOptions(host=host, port=port, local_prefill_tokens=local_prefill_tokens),
    )
    sys.exit(run_service(config, _stay))


def run_service(
    config: ServiceConfig, while_ready: Callable[[Owner, str, TerminalProgress], float | None]
) -> int:
    """Starts, calls `while_ready(owner, addresses, progress)`, and ends everything in any case.

    `while_ready` returns how long running requests have, or None for no drain. Returns the exit
    code.
    """
    from legato.cluster.owner import Owner, StartInterruptedError, StopSignal

    stop = StopSignal()
    stop.install()
    progress = TerminalProgress()
    owner = Owner(config, progress, stop)
    drain_timeout_s: float | None = None
    because = ""
    try:
        address = owner.start()
        progress.close()
        drain_timeout_s = while_ready(owner, address, progress)
    except StartInterruptedError:
        progress.stage("interrupted")
        return 130
    except ServiceError as error:
        because = str(error)
        raise
    finally:
        owner.end(drain_timeout_s, because)
        progress.close()
    progress.stage("ended")
    return 0


def _stay(owner: Owner, address: str, progress: TerminalProgress) -> float:
    first = address.partition(",")[0]
    for line in _kv_lines(first):
        progress.stage(line)
    progress.stage(f"ready at {address}")
    at = "" if address == f"127.0.0.1:{DEFAULT_PORT}" else f" --address {address}"
    progress.stage(f'try: legato generate "Why is the sky blue?"{at}   (Ctrl-C ends the service)')
    return owner.wait()


def _kv_lines(address: str) -> list[str]:
    from legato.cluster.heartbeat import dial_address
    from legato.protos import generation_pb2, generation_pb2_grpc

    try:
        with connect(dial_address(address)) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            model = stub.GetModel(generation_pb2.GetModelRequest(), timeout=CALL_TIMEOUT_S)
    except ServiceError as error:  # the service may do well all the same
        return [f"KV cache: not known ({error})"]
    return kv_lines(model)
