"""`legato serve`: starts a service and stays until it is told to end."""

from __future__ import annotations

import re
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, cast

import typer

from legato.cluster.cli.autoscale_flags import AutoscaleFlags
from legato.cluster.cli.connection import CALL_TIMEOUT_S, DEFAULT_PORT, connect
from legato.cluster.cli.kv_capacity import kv_lines
from legato.cluster.cli.memory_size import parse_fraction, parse_size, parse_size_or_0
from legato.cluster.cli.pool_options import check_pools, check_sizes
from legato.cluster.cli.progress import TerminalProgress
from legato.cluster.config import KV_WIRES, WEIGHTS, EngineOptions, RouterOptions, ServiceConfig
from legato.cluster.errors import ServiceError
from legato.cluster.resource_demand import NO_DEMAND, parse_demand

if TYPE_CHECKING:
    from collections.abc import Callable

    from legato.cluster.config import Admission, KvLane
    from legato.cluster.owner import Owner
    from legato.cluster.resource_demand import ResourceDemand


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, a hub id, a .gguf file, or `demo` for the demo model."
        ),
    ],
    prefill: Annotated[int, typer.Option(min=0, max=1024, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, max=1024, help="Decode workers.")] = 1,
    colocated: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="Workers that compute prompts and decode: alone with --prefill 0 --decode 0, "
            "or beside the others.",
        ),
    ] = 0,
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
        int, typer.Option(min=1, help="Prompt tokens of a step in which nothing is decoded.")
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
    prefill_resources: Annotated[
        str | None,
        typer.Option(
            help="What a prefill worker asks of its node: CPU=4,GPU=1,memory=16GB, custom "
            "resources as fast_gpu=1, and node labels as label:zone=a. CPU and GPU here go before "
            "--worker-cpus and --worker-gpus; GPU=0 is the CPU.",
            show_default=False,
        ),
    ] = None,
    decode_resources: Annotated[
        str | None,
        typer.Option(
            help="The same of a decode worker, so that the pools may have machines of their own.",
            show_default=False,
        ),
    ] = None,
    colocated_resources: Annotated[
        str | None,
        typer.Option(help="The same of a colocated worker.", show_default=False),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="prefill=MIN..MAX decode=MIN..MAX",
            help="Let the pools grow and shrink with the load, each within its range; "
            "--prefill and --decode are what they start with.",
            show_default=False,
        ),
    ] = None,
    autoscale_more: Annotated[  # an option takes one word: here is the other
        list[str] | None, typer.Argument(hidden=True, metavar="[POOL=MIN..MAX]...")
    ] = None,
    autoscale_dry_run: Annotated[
        bool,
        typer.Option("--autoscale-dry-run", help="Decide and tell, and change nothing."),
    ] = False,
    ttft_slo: Annotated[
        str | None,
        typer.Option(
            help="Time to first token that prefill is scaled for. Default: 500ms.",
            show_default=False,
        ),
    ] = None,
    itl_slo: Annotated[
        str | None,
        typer.Option(
            help="Time between tokens that decode is scaled for. Default: 50ms.",
            show_default=False,
        ),
    ] = None,
    autoscale_up_after: Annotated[
        str | None,
        typer.Option(
            help="So long more workers must be needed before they come. Default: 3s.",
            show_default=False,
        ),
    ] = None,
    autoscale_down_after: Annotated[
        str | None,
        typer.Option(
            help="So long fewer must be enough before one goes. Default: 60s.",
            show_default=False,
        ),
    ] = None,
    autoscale_cool_down: Annotated[
        str | None,
        typer.Option(
            help="So long a pool is left alone once it has changed. Default: 15s.",
            show_default=False,
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until every worker must be ready.")
    ] = 120.0,
    restart: Annotated[bool, typer.Option(help="Replace workers that are lost.")] = True,
    request_log: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            resolve_path=True,
            help="Append what becomes of each request, and where, to this file, as JSON lines.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start a service and stay until Ctrl-C or `legato stop`.

    Examples:

        legato serve --model demo

        legato serve --model ./my-model --prefill 1 --decode 2 --kv-memory 4GiB

        legato serve --model org/name --ray-address auto --device cuda

        legato serve --model org/name --ray-address auto --decode-resources GPU=0,CPU=16

        legato serve --model demo --colocated 2 --prefill 0 --decode 0

        legato serve --model ./my-model --autoscale prefill=1..4 decode=1..8 --ttft-slo 500ms
    """
    if kv_lane not in ("auto", "grpc"):
        raise typer.BadParameter(f"must be auto or grpc, got {kv_lane!r}", param_hint="--kv-lane")
    if not worker_host.strip():
        raise typer.BadParameter("must be auto or an address", param_hint="--worker-host")
    if kv_wire not in KV_WIRES:
        raise typer.BadParameter(
            f"must be one of {', '.join(KV_WIRES)}, got {kv_wire!r}", param_hint="--kv-wire"
        )
    if weights not in WEIGHTS:
        raise typer.BadParameter(
            f"must be one of {', '.join(WEIGHTS)}, got {weights!r}", param_hint="--weights"
        )
    check_sizes(prefill, decode, colocated)
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
    autoscale_options = AutoscaleFlags(
        ranges=autoscale,
        more_words=tuple(autoscale_more or ()),
        dry_run=autoscale_dry_run,
        ttft_slo=ttft_slo,
        itl_slo=itl_slo,
        up_after=autoscale_up_after,
        down_after=autoscale_down_after,
        cool_down=autoscale_cool_down,
    ).read(prefill, decode)
    config = ServiceConfig(
        model=model,
        prefill_workers=prefill,
        decode_workers=decode,
        colocated_workers=colocated,
        num_routers=routers,
        ray_address=ray_address,
        worker_host=worker_host,
        worker_cpus=worker_cpus,
        worker_gpus=worker_gpus,
        prefill_resources=_demand(prefill_resources, "--prefill-resources"),
        decode_resources=_demand(decode_resources, "--decode-resources"),
        colocated_resources=_demand(colocated_resources, "--colocated-resources"),
        start_timeout_s=start_timeout,
        restart=restart,
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
        router=RouterOptions(
            host=host,
            port=port,
            local_prefill_tokens=local_prefill_tokens,
            request_log=None if request_log is None else str(request_log),
            reports_load=autoscale_options is not None,
        ),
        autoscale=autoscale_options,
    )
    sys.exit(run_service(config, _stay))


def _demand(text: str | None, option: str) -> ResourceDemand:
    try:
        return NO_DEMAND if text is None else parse_demand(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


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
