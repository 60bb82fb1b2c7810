"""`legato bench`: a load on a running service, and what its users would feel."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.client_flags import chosen_access
from legato.cluster.cli.connection import (
    AddressOption,
    PortOption,
    choose_address,
    open_targets,
    sentences,
)
from legato.cluster.cli.load_options import (
    MAX_RATE_PER_S,
    InputOption,
    OutputOption,
    PrefixOption,
    TraceOption,
    read_traffic,
)
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legato.bench.load.sample import Sample
    from legato.bench.load.workload import LoadWorkload
    from legato.cluster.cli.bench_progress import BenchProgress

SOME_FAILED, INTERRUPTED = 1, 130  # exit codes
MAX_CONCURRENCY, MAX_REQUESTS = 10_000, 10_000_000
MAX_SECONDS = 1e6


def bench(
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=MAX_RATE_PER_S,
            help="Requests per second, at times of their own (Poisson), whatever becomes of those "
            "before. Latencies count from these times.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CONCURRENCY,
            help="Instead of --rate: so many at a time; the next one is sent when one has ended.",
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_REQUESTS, help="Send so many.", show_default=False),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MAX_SECONDS,
            help="Send for so many seconds; what is under way then is waited for.",
            show_default=False,
        ),
    ] = None,
    input_tokens: InputOption = None,
    output_tokens: OutputOption = None,
    trace: TraceOption = None,
    prefix_share: PrefixOption = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="The same seed, the same requests.")
    ] = 0,
    warmup: Annotated[
        int, typer.Option(min=0, max=1000, help="Requests that go first and do not count.")
    ] = 1,
    ttft_slo: Annotated[
        float | None,
        typer.Option(min=1e-6, max=MAX_SECONDS, help="Good is a first token within so many s."),
    ] = None,
    itl_slo: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=MAX_SECONDS,
            help="Good are answers with a token each so many seconds, on average.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds for one request.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Put a running service under load, and measure what its users feel.

    Prompts are random tokens, answers as long as asked. Ctrl-C ends it, and what was measured
    until then is printed. Exit codes: 0 every request was answered; 1 some failed; 130 Ctrl-C.

    Examples:

        legato bench --concurrency 8 --num-requests 64 --input-tokens 128 --output-tokens 64

        legato bench --rate 5 --duration 60 --input-tokens 100..900 --output-tokens 16..256

        legato bench --trace traffic.jsonl --ttft-slo 0.5 --itl-slo 0.05 --json
    """
    from legato.bench.load.report import Slo, report
    from legato.bench.load.warmup import Warmup
    from legato.bench.load.workload import LoadWorkload

    inputs, outputs, lines = read_traffic(input_tokens, output_tokens, trace)
    if num_requests is None and duration is None and lines is None:
        raise typer.BadParameter("--num-requests or --duration says when it ends")
    try:
        workload = LoadWorkload(
            inputs,
            outputs,
            lines,
            rate,
            concurrency,
            num_requests,
            duration,
            prefix_share,
            seed,
            warmup=Warmup(warmup),
        )
    except ValueError as error:
        raise typer.BadParameter(f"{error} (--rate, --concurrency, or --trace with at_s)") from None
    samples, interrupted = _run(workload, choose_address(address, port), timeout, warmup)
    figures = report(samples, Slo(ttft_slo, itl_slo))
    if as_json:
        print(json.dumps({"interrupted": interrupted, **figures}))
    else:
        from rich.console import Console

        from legato.cluster.cli.bench_table import bench_tables

        console = Console(highlight=False)
        for table in bench_tables(figures):
            console.print(table)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if figures["failed"] or not figures["ok"]:
        raise typer.Exit(SOME_FAILED)


def _run(
    workload: LoadWorkload, address: str, timeout_s: float, num_warmup: int
) -> tuple[list[Sample], bool]:
    from legato.cluster.cli.bench_progress import BenchProgress

    with sentences(address), BenchProgress(workload.num_requests) as progress:
        try:
            return asyncio.run(_load(workload, address, timeout_s, num_warmup, progress))
        except ValueError as error:
            raise ServiceError(str(error)) from error


async def _load(
    workload: LoadWorkload,
    address: str,
    timeout_s: float,
    num_warmup: int,
    progress: BenchProgress,
) -> tuple[list[Sample], bool]:
    from legato.bench.load.grpc_target import GrpcTarget
    from legato.bench.load.run import send_load

    stop = asyncio.Event()
    async with GrpcTarget(open_targets(address), chosen_access()) as target:
        with _interrupts_set(stop):
            samples = await send_load(
                workload, target, timeout_s=timeout_s, stop=stop, on_change=progress.take
            )
    return samples, stop.is_set()


@contextmanager
def _interrupts_set(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the load, the second one the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        print("legato: no more is sent; what was measured follows", file=sys.stderr)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
