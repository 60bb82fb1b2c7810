"""What `legato serve` takes for the service: its pools, routers, places and bounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from legato.cluster.pool import MAX_POOL_SIZE
from legato.cluster.router_ports import HTTP_OFFSET
from legato.protos.tracing import check_installed, read_endpoint

ModelOption = Annotated[
    str,
    typer.Option(
        help="A Hugging Face folder, a hub id, a .gguf file, or `demo` for the demo model."
    ),
]

PrefillOption = Annotated[int, typer.Option(min=0, max=MAX_POOL_SIZE, help="Prefill workers.")]

DecodeOption = Annotated[int, typer.Option(min=0, max=MAX_POOL_SIZE, help="Decode workers.")]

ColocatedOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_POOL_SIZE,
        help="Workers that compute prompts and decode: alone with --prefill 0 --decode 0, "
        "or beside the others.",
    ),
]

HostOption = Annotated[
    str,
    typer.Option(help="Where clients reach it. Who may: --api-token-file, --tls-ca."),
]

PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")]

HttpPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Where the OpenAI-compatible HTTP endpoint listens; of several routers, here and at "
        f"the ports that follow. 0 takes any free one. Default: --port + {HTTP_OFFSET}.",
        show_default=False,
    ),
]

HttpOption = Annotated[bool, typer.Option("--http/--no-http", help="Serve HTTP beside gRPC.")]

RoutersOption = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Routers, at --port and those that follow it. Clients that are told all of "
        "their addresses go on at another when one dies.",
    ),
]

RayAddressOption = Annotated[
    str | None,
    typer.Option(
        help="Join a running Ray cluster: host:port, or `auto` for the one of this machine. "
        "Without it, a Ray of its own is started.",
        show_default=False,
    ),
]

LocalPrefillTokensOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Up to so many tokens of a prompt that a decode worker has no KV of, it computes "
        "itself where that is measured to cost less than the hand-off; 0 is off.",
    ),
]

WorkerHostOption = Annotated[
    str,
    typer.Option(help="Where workers listen. auto: loopback, or each node's address in a cluster."),
]

WorkerCpusOption = Annotated[
    float | None,
    typer.Option(min=0, help="Ray CPUs of a worker. Default: 1 in a joined cluster."),
]

WorkerGpusOption = Annotated[
    float | None, typer.Option(min=0, help="Ray GPUs of a worker. Default: 1 on cuda.")
]

PrefillResourcesOption = Annotated[
    str | None,
    typer.Option(
        help="What a prefill worker asks of its node: CPU=4,GPU=1,memory=16GB, custom "
        "resources as fast_gpu=1, and node labels as label:zone=a. CPU and GPU here go before "
        "--worker-cpus and --worker-gpus; GPU=0 is the CPU.",
        show_default=False,
    ),
]

DecodeResourcesOption = Annotated[
    str | None,
    typer.Option(
        help="The same of a decode worker, so that the pools may have machines of their own.",
        show_default=False,
    ),
]

ColocatedResourcesOption = Annotated[
    str | None,
    typer.Option(help="The same of a colocated worker.", show_default=False),
]

StartTimeoutOption = Annotated[
    float, typer.Option(min=1, help="Seconds until every worker must be ready.")
]

RestartOption = Annotated[bool, typer.Option(help="Replace workers that are lost.")]


def _appendable(path: Path | None) -> Path | None:
    """Now, rather than when the routers are started: that is half a minute later."""
    if path is not None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe may have no reader
        try:
            os.close(os.open(path, flags, 0o666))
        except OSError as error:
            raise typer.BadParameter(f"cannot append to {str(path)!r}: {error.strerror}") from error
    return path


def _collector(text: str | None) -> str | None:
    if text is not None:
        try:
            text = read_endpoint(text)
            check_installed()
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return text


OtlpEndpointOption = Annotated[
    str | None,
    typer.Option(
        callback=_collector,
        help="Send traces to this OpenTelemetry collector: host:port of OTLP over gRPC.",
        show_default=False,
    ),
]

TraceShareOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Of the requests whose client does not say whether to trace, so many are traced.",
    ),
]

RequestLogOption = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        resolve_path=True,
        callback=_appendable,
        help="Append what becomes of each request, and where, to this file, as JSON lines.",
        show_default=False,
    ),
]
