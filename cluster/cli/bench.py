"""`legato bench`: a load on a running service, and what its users would feel."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Any

import typer

from legato.cluster.cli.bench_options import (
    ArrivalsOption,
    ConcurrencyOption,
    DurationOption,
    HtmlOption,
    ItlOption,
    JsonOption,
    MinWindowOption,
    ModelOption,
    NumRequestsOption,
    PercentileOption,
    PlotOption,
    RateOption,
    SeedOption,
    TimeoutOption,
    TtftOption,
    UrlOption,
    WarmupOption,
    check_folder,
    read,
    read_urls,
)
from legato.cluster.cli.connection import AddressOption, PortOption, choose_address
from legato.cluster.cli.load_options import (
    InputOption,
    OutputOption,
    PrefixOption,
    TraceOption,
    read_traffic,
)
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.bench.load.slo import Slo
    from legato.bench.load.warmup import Warmup
    from legato.cluster.cli.bench_run import BenchRun

# Exit codes.
SOME_FAILED, TOO_SHORT, MISSED, INTERRUPTED = 1, 3, 4, 130


def bench(
    context: typer.Context,
    rate: RateOption = None,
    arrivals: ArrivalsOption = "poisson",
    concurrency: ConcurrencyOption = None,
    num_requests: NumRequestsOption = None,
    duration: DurationOption = None,
    warmup: WarmupOption = None,
    input_tokens: InputOption = None,
    output_tokens: OutputOption = None,
    trace: TraceOption = None,
    prefix_share: PrefixOption = 0.0,
    seed: SeedOption = None,
    ttft_slo: TtftOption = None,
    itl_slo: ItlOption = None,
    percentile: PercentileOption = 99.0,
    min_window: MinWindowOption = 10.0,
    timeout: TimeoutOption = 300.0,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    html: HtmlOption = None,
    url: UrlOption = None,
    model: ModelOption = None,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Put a running service under load, and measure what its users feel.

    Prompts are random and as a rule new, answers as long as asked. Rates and inter-token latencies
    are of the window in which all of the load was there. Ctrl-C ends it, and what was measured
    until then is printed.

    Exit codes: 0 the figures stand, and the targets are met; 1 requests failed, 3 the window was
    too short: no verdict; 4 the targets are missed; 130 Ctrl-C.

    Examples:

        legato bench --concurrency 8 --duration 60 --input-tokens 128 --output-tokens 64

        legato bench --rate 5 --duration 60 --warmup 10s --input-tokens 100..900 --output-tokens 99

        legato bench --trace traffic.jsonl --ttft-slo 0.5 --itl-slo 0.05 --html report.html

        legato bench --url http://host:80 --rate 2 --duration 60 --input-tokens 64 --output-tokens 9
    """
    from legato.bench.load.arrivals import Arrivals
    from legato.bench.load.slo import Slo
    from legato.bench.load.workload import LoadWorkload, draw_seed

    inputs, outputs, lines = read_traffic(input_tokens, output_tokens, trace)
    if num_requests is None and duration is None and lines is None:
        raise typer.BadParameter("--num-requests or --duration says when it ends")
    urls = read_urls(context, url, model)
    where = choose_address(address, port)
    _check_files(plot, html)
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
            draw_seed() if seed is None else seed,
            arrivals=read("--arrivals", Arrivals.parse, arrivals),
            warmup=_warmup(warmup, concurrency, is_trace=lines is not None),
        )
    except ValueError as error:
        raise typer.BadParameter(f"{error} (--rate, --concurrency, or --trace with at_s)") from None
    from legato.cluster.cli.bench_run import run_bench

    run = run_bench(workload, urls, model, where, timeout)
    figures = _figures(run, Slo(ttft_slo, itl_slo, percentile), min_window, workload.settings())
    _tell(figures, as_json=as_json)
    _write(run, figures, plot, html)
    if code := _exit_code(figures):
        raise typer.Exit(code)


def _warmup(text: str | None, concurrency: int | None, *, is_trace: bool) -> Warmup:
    from legato.bench.load.warmup import Warmup

    if text is not None:
        return read("--warmup", Warmup.parse, text)
    # The first of each stream come all at once, as no others do. A trace is counted whole.
    return Warmup(0 if concurrency is None or is_trace else concurrency)


def _check_files(plot: Path | None, html: Path | None) -> None:
    check_folder("--plot", plot)
    check_folder("--html", html)
    if plot is not None:
        from legato.bench.load.plot import check_plot

        try:
            check_plot(plot)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--plot") from None


def _figures(
    run: BenchRun,
    slo: Slo,
    min_window_s: float,
    settings: dict[str, object],
) -> dict[str, Any]:
    from legato.bench.load.report import report

    return {
        "interrupted": run.interrupted,
        "target": asdict(run.served),
        "load": settings,
        **report(run.samples, slo, run.server, min_window_s=min_window_s),
    }


def _tell(figures: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console

    from legato.cluster.cli.bench_table import bench_tables

    console = Console(highlight=False)
    for part in bench_tables(figures):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def _write(run: BenchRun, figures: dict[str, Any], plot: Path | None, html: Path | None) -> None:
    if (plot is None and html is None) or not run.samples:
        return
    from legato.bench.load.curves import curves

    shown = curves(run.samples)
    try:
        if html is not None:
            from legato.bench.load.html_report import html_report

            when = time.strftime("%Y-%m-%d %H:%M:%S %z")
            html.write_text(html_report(figures, shown, when), encoding="utf-8")
        if plot is not None:
            from legato.bench.load.plot import draw

            draw(
                plot, f"{run.served.model or run.served.where}: {figures['verdict']['text']}", shown
            )
    except OSError as error:
        raise ServiceError(f"{error.filename!r} cannot be written: {error.strerror}") from error


def _exit_code(figures: dict[str, Any]) -> int:
    verdict = figures["verdict"]
    if figures["interrupted"]:
        return INTERRUPTED
    if figures["failed"] or not figures["ok"]:
        return SOME_FAILED
    if verdict["refused_because"]:
        return TOO_SHORT
    return MISSED if verdict["met"] is False else 0
