"""ServiceFlags: what `legato serve` takes for the service: pools, routers, places and bounds."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from legato.cluster.cli.service_forms import AppendedFile, Collector, Demand, Share
from legato.cluster.cli.setting_forms import Matching, Number, Real, Switch, Text
from legato.cluster.config import RouterOptions
from legato.cluster.config import ServiceConfig as Config
from legato.cluster.pool import MAX_POOL_SIZE
from legato.cluster.resource_demand import NO_DEMAND, ResourceDemand
from legato.cluster.router_ports import HTTP_OFFSET, MAX_PORT

_POOL = Number(0, MAX_POOL_SIZE)
_NAME = Matching(r"[!-~]{1,256}", "1 to 256 ASCII characters without spaces", "NAME")


class ServiceFlags(BaseModel):
    """Each is an option, a variable and a key of the file."""

    service_title: ClassVar[str] = "Service"

    model: Annotated[str, Text("FOLDER|FILE|ID")] = Field(
        description="A Hugging Face folder, a hub id, a .gguf file, or `demo` for the demo model."
    )
    served_model_name: Annotated[str | None, _NAME] = Field(
        Config.served_model_name,
        description="What clients call the model, in the place of what --model says.",
    )
    prefill: Annotated[int, _POOL] = Field(Config.prefill_workers, description="Prefill workers.")
    decode: Annotated[int, _POOL] = Field(Config.decode_workers, description="Decode workers.")
    colocated: Annotated[int, _POOL] = Field(
        Config.colocated_workers,
        description="Workers that compute prompts and decode: alone with --prefill 0 --decode 0, "
        "or beside the others.",
    )
    host: Annotated[str, Text("ADDRESS")] = Field(
        RouterOptions.host,
        description="Where clients reach it. Who may: --api-token-file, --tls-ca.",
    )
    port: Annotated[int, Number(0, MAX_PORT)] = Field(
        RouterOptions.port, description="0 takes any free one."
    )
    http: Annotated[bool, Switch()] = Field(True, description="Serve HTTP beside gRPC.")
    http_port: Annotated[int | None, Number(0, MAX_PORT)] = Field(
        None,
        description="Where the OpenAI-compatible HTTP endpoint listens; of several routers, here "
        f"and at the ports that follow. 0 takes any free one. Without it --port + {HTTP_OFFSET}.",
    )
    routers: Annotated[int, Number(1, 16)] = Field(
        Config.num_routers,
        description="Routers, at --port and those that follow it. Clients that are told all of "
        "their addresses go on at another when one dies.",
    )
    ray_address: Annotated[str | None, Text("HOST:PORT|auto")] = Field(
        None,
        description="Join a running Ray cluster: host:port, or `auto` for the one of this machine. "
        "Without it, a Ray of its own is started.",
    )
    await_nodes: Annotated[int, Number(0, 100_000)] = Field(
        Config.await_nodes,
        description="In a joined cluster: first wait, within --start-timeout, until it has so many "
        "nodes, the head's included.",
    )
    local_prefill_tokens: Annotated[int, Number(0)] = Field(
        RouterOptions.local_prefill_tokens,
        description="Up to so many tokens of a prompt that a decode worker has no KV of, it "
        "computes itself where that is measured to cost less than the hand-off; 0 is off.",
    )
    worker_host: Annotated[str, Text("auto|ADDRESS")] = Field(
        Config.worker_host,
        description="Where workers listen. auto: loopback, or each node's address in a cluster.",
    )
    worker_cpus: Annotated[float | None, Real(0)] = Field(
        None, description="Ray CPUs of a worker. Without it 1 in a joined cluster."
    )
    worker_gpus: Annotated[float | None, Real(0)] = Field(
        None, description="Ray GPUs of a worker. Without it 1 on cuda."
    )
    prefill_resources: Annotated[ResourceDemand, Demand()] = Field(
        NO_DEMAND,
        description="What a prefill worker asks of its node: CPU=4,GPU=1,memory=16GB, custom "
        "resources as fast_gpu=1, and node labels as label:zone=a. CPU and GPU here go before "
        "--worker-cpus and --worker-gpus; GPU=0 is the CPU.",
    )
    decode_resources: Annotated[ResourceDemand, Demand()] = Field(
        NO_DEMAND,
        description="The same of a decode worker, so that the pools may have machines of their "
        "own.",
    )
    colocated_resources: Annotated[ResourceDemand, Demand()] = Field(
        NO_DEMAND, description="The same of a colocated worker."
    )
    start_timeout: Annotated[float, Real(1)] = Field(
        Config.start_timeout_s, description="Seconds until every worker must be ready."
    )
    restart: Annotated[bool, Switch()] = Field(
        Config.restart, description="Replace workers that are lost."
    )
    request_log: Annotated[str | None, AppendedFile()] = Field(
        RouterOptions.request_log,
        description="Append what becomes of each request, and where, to this file, as JSON lines.",
    )
    otlp_endpoint: Annotated[str | None, Collector()] = Field(
        RouterOptions.otlp_endpoint,
        description="Send traces to this OpenTelemetry collector: host:port of OTLP over gRPC.",
    )
    trace_share: Annotated[float, Share()] = Field(
        RouterOptions.trace_share,
        description="Of the requests whose client does not say whether to trace, so many are "
        "traced.",
    )
