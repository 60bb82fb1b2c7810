"""`legato serve`: starts a service and stays until it is told to end."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, cast

import typer

from legato.cluster.cli.autoscale_flags import (
    AutoscaleCoolDownOption,
    AutoscaleDownAfterOption,
    AutoscaleDryRunOption,
    AutoscaleFlags,
    AutoscaleMoreOption,
    AutoscaleOption,
    AutoscaleUpAfterOption,
    ItlSloOption,
    TtftSloOption,
)
from legato.cluster.cli.connection import DEFAULT_PORT
from legato.cluster.cli.engine_flags import (  # noqa: TC001  # typer reads the annotations
    AdmissionOption,
    AdmissionRiskOption,
    BlockSizeOption,
    ContextLengthOption,
    DecodeDtypeOption,
    DecodeKvCacheOption,
    DeterministicOption,
    DeviceOption,
    DtypeOption,
    KvCacheOption,
    KvLaneOption,
    KvMemoryOption,
    KvWireOption,
    MaxBatchSizeOption,
    PrefillChunkTokensOption,
    PrefixCacheOption,
    SwapMemoryOption,
    ThreadsOption,
    WeightsOption,
)
from legato.cluster.cli.memory_size import parse_fraction, parse_size, parse_size_or_0
from legato.cluster.cli.pool_options import check_pools, check_sizes
from legato.cluster.cli.security_flags import (  # typer reads the annotations
    AllowPlainTokenOption,
    ApiTokenFileOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    WorkerTlsCertOption,
    WorkerTlsKeyOption,
    tls_files,
)
from legato.cluster.cli.service_flags import (  # noqa: TC001  # typer reads the annotations
    ColocatedOption,
    ColocatedResourcesOption,
    DecodeOption,
    DecodeResourcesOption,
    HostOption,
    HttpOption,
    HttpPortOption,
    LocalPrefillTokensOption,
    ModelOption,
    OtlpEndpointOption,
    PortOption,
    PrefillOption,
    PrefillResourcesOption,
    RayAddressOption,
    RequestLogOption,
    RestartOption,
    RoutersOption,
    StartTimeoutOption,
    TraceShareOption,
    WorkerCpusOption,
    WorkerGpusOption,
    WorkerHostOption,
)
from legato.cluster.cli.service_run import run_service, stay
from legato.cluster.config import KV_WIRES, WEIGHTS, EngineOptions, RouterOptions, ServiceConfig
from legato.cluster.resource_demand import NO_DEMAND, parse_demand
from legato.cluster.router_ports import default_http_port

if TYPE_CHECKING:
    from legato.cluster.config import Admission, KvLane
    from legato.cluster.resource_demand import ResourceDemand


def serve(
    model: ModelOption,
    prefill: PrefillOption = 1,
    decode: DecodeOption = 1,
    colocated: ColocatedOption = 0,
    host: HostOption = "127.0.0.1",
    port: PortOption = DEFAULT_PORT,
    http: HttpOption = True,
    http_port: HttpPortOption = None,
    routers: RoutersOption = 1,
    ray_address: RayAddressOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    kv_cache: KvCacheOption = "auto",
    decode_dtype: DecodeDtypeOption = None,
    decode_kv_cache: DecodeKvCacheOption = None,
    kv_lane: KvLaneOption = "auto",
    kv_wire: KvWireOption = "same",
    weights: WeightsOption = "auto",
    deterministic: DeterministicOption = False,
    kv_memory: KvMemoryOption = "1GiB",
    swap_memory: SwapMemoryOption = None,
    admission: AdmissionOption = EngineOptions.admission,
    admission_risk: AdmissionRiskOption = EngineOptions.admission_risk,
    block_size: BlockSizeOption = 16,
    context_length: ContextLengthOption = None,
    threads: ThreadsOption = None,
    max_batch_size: MaxBatchSizeOption = 256,
    prefill_chunk_tokens: PrefillChunkTokensOption = 2048,
    prefix_cache: PrefixCacheOption = True,
    local_prefill_tokens: LocalPrefillTokensOption = RouterOptions.local_prefill_tokens,
    worker_host: WorkerHostOption = "auto",
    worker_cpus: WorkerCpusOption = None,
    worker_gpus: WorkerGpusOption = None,
    prefill_resources: PrefillResourcesOption = None,
    decode_resources: DecodeResourcesOption = None,
    colocated_resources: ColocatedResourcesOption = None,
    autoscale: AutoscaleOption = None,
    autoscale_more: AutoscaleMoreOption = None,
    autoscale_dry_run: AutoscaleDryRunOption = False,
    ttft_slo: TtftSloOption = None,
    itl_slo: ItlSloOption = None,
    autoscale_up_after: AutoscaleUpAfterOption = None,
    autoscale_down_after: AutoscaleDownAfterOption = None,
    autoscale_cool_down: AutoscaleCoolDownOption = None,
    start_timeout: StartTimeoutOption = 120.0,
    restart: RestartOption = True,
    request_log: RequestLogOption = None,
    otlp_endpoint: OtlpEndpointOption = None,
    trace_share: TraceShareOption = RouterOptions.trace_share,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_ca: TlsCaOption = None,
    worker_tls_cert: WorkerTlsCertOption = None,
    worker_tls_key: WorkerTlsKeyOption = None,
    api_token_file: ApiTokenFileOption = None,
    allow_plain_token: AllowPlainTokenOption = False,
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
            otlp_endpoint=otlp_endpoint,
            max_batch_size=max_batch_size,
            context_length=context_length,
            num_threads=threads,
        ),
        decode_dtype=decode_dtype,
        decode_kv_cache=decode_kv_cache,
        router=RouterOptions(
            host=host,
            port=port,
            http_port=_http_port(port, http_port) if http else None,
            local_prefill_tokens=local_prefill_tokens,
            request_log=None if request_log is None else str(request_log),
            otlp_endpoint=otlp_endpoint,
            trace_share=trace_share,
            tls=tls_files(tls_cert, tls_key, tls_ca),
            token_file=None if api_token_file is None else str(api_token_file),
            reports_load=autoscale_options is not None,
        ),
        autoscale=autoscale_options,
        worker_tls=tls_files(worker_tls_cert, worker_tls_key, None, "--worker-tls"),
        allow_plain_token=allow_plain_token,
    )
    sys.exit(run_service(config, stay))


def _http_port(port: int, asked: int | None) -> int:
    return default_http_port(port) if asked is None else asked


def _demand(text: str | None, option: str) -> ResourceDemand:
    try:
        return NO_DEMAND if text is None else parse_demand(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
