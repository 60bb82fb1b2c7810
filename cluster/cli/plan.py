"""`legato plan`: how many prefill and decode workers a traffic needs, before there are any."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cluster.cli.load_options import (
    MAX_RATE_PER_S,
    InputOption,
    OutputOption,
    TraceOption,
    read_traffic,
)
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.plan.answer import Answer
    from legato.plan.basis import Basis
    from legato.plan.prediction import Predictor, Slowdown
    from legato.plan.simulation.verified_plan import VerifiedPlan
    from legato.plan.traffic import Traffic

MAX_SECONDS = 1e6


def plan(
    ttft_slo: Annotated[
        float,
        typer.Option(min=1e-6, max=MAX_SECONDS, help="First tokens are to come within so many s."),
    ],
    itl_slo: Annotated[
        float,
        typer.Option(min=1e-6, max=MAX_SECONDS, help="Tokens are to follow within so many s."),
    ],
    percentile: Annotated[
        float, typer.Option(min=50, max=99, help="Of first tokens and gaps, so many percent do.")
    ] = 99.0,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3, max=MAX_RATE_PER_S, help="Requests per second; without it the trace's own."
        ),
    ] = None,
    input_tokens: InputOption = None,
    output_tokens: OutputOption = None,
    trace: TraceOption = None,
    prefix_share: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Of a prompt's tokens, the share that prefill finds cached."
        ),
    ] = 0.0,
    profile: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="What `legato profile` wrote; it has the model too."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Without a profile: a GPU, by its datasheet, such as H100 or L4."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --gpu: a folder, its config.json, a .gguf file, or `demo`."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --gpu, as of `legato serve`.")] = "auto",
    weights: Annotated[str, typer.Option(help="With --gpu: auto, int8 or int4.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="With --gpu: auto, fp8 or int8.")] = "auto",
    link: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=1e5,
            help="With --gpu: Gbit/s from a prefill worker to decode workers. Default 100.",
            show_default=False,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Of each worker, such as 8GiB. Default: the profile's, or what the GPU has left.",
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Sequences of a decode step. Default: the profile's, or 256.",
            show_default=False,
        ),
    ] = None,
    one_machine: Annotated[
        bool,
        typer.Option(
            "--one-machine",
            help="With --profile: prefill and decode share a machine as they did there, and slow "
            "each other down as was measured.",
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Play the traffic through router and schedulers in virtual time, and plan the "
            "fewest workers that keep the targets there.",
        ),
    ] = False,
    requests: Annotated[
        int | None,
        typer.Option(
            min=100,
            max=10_000_000,
            help="With --simulate: so many, of which 70 % are measured. Default: 2,000, or as many "
            "as fill the service several times.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="With --simulate: draws the requests.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write the service's settings here, for `legato serve --config`.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say how many prefill and decode workers keep the targets, and what runs out first.

    By closed forms over a measured profile, or over a GPU's datasheet with efficiencies that are
    printed; with --simulate confirmed, or corrected, by a simulation. docs/planning.md has the
    formulas, and what they and the simulation leave out.

    Examples:

        legato plan --profile profile.json --trace traffic.jsonl --ttft-slo 1 --itl-slo 0.1

        legato plan --gpu H100 --model ./my-model --rate 20 --input-tokens 100..4000 \\
            --output-tokens lognormal:200:0.7:2000 --ttft-slo 0.5 --itl-slo 0.05 -o legato.yaml
    """
    from legato.plan.answer import make_answer
    from legato.plan.prediction import Predictor
    from legato.plan.service_file import service_file
    from legato.plan.targets import Targets

    if requests is not None and not simulate:
        raise typer.BadParameter("--requests goes with --simulate")
    if simulate and prefix_share:
        raise typer.BadParameter(
            "--prefix-share does not go with --simulate: prefixes in common are not simulated"
        )
    traffic = _traffic(input_tokens, output_tokens, trace, rate, prefix_share)
    of_gpu = {"model": model, "link": link}
    of_gpu |= {
        name: value
        for name, value in (("dtype", dtype), ("weights", weights), ("kv-cache", kv_cache))
        if value != "auto"
    }
    try:
        basis = _basis(profile, gpu, of_gpu, kv_memory, max_batch_size)
        if one_machine and basis.slowdown is None:
            raise typer.BadParameter("--one-machine goes with --profile, where it was measured")
        slowdown = basis.slowdown if one_machine else None
        targets = Targets(ttft_slo, itl_slo, percentile)
        predictor = Predictor(basis.times, traffic, basis.size, targets, slowdown)
        answer = make_answer(predictor, basis.kv_bytes_per_token)
        planned = answer
        verified = None
        if simulate:
            verified = _verify(basis, predictor, answer, slowdown, requests, seed)
            planned = verified.answer(predictor, answer, basis.kv_bytes_per_token)
    except ValueError as error:
        raise ServiceError(str(error)) from error
    from legato.cluster.cli.plan_table import plan_lines, plan_summary, simulated_lines

    text = service_file(planned, basis.worker, plan_summary(planned, traffic, verified))
    if output is not None:
        _write(output, text)
    if as_json:
        found = {**planned.as_json(), "basis": basis.text, "legato_yaml": text}
        if verified is not None:
            found["closed_forms"] = [answer.prefill_workers, answer.decode_workers]
            found["simulated"] = verified.as_json()
        print(json.dumps(found))
        return
    print("\n".join(plan_lines(planned, traffic, basis.text)))
    if verified is not None:
        print("\n".join(simulated_lines(verified, answer, targets)))
    print(f"\n{text}" if output is None else f"settings: {output}")


def _verify(
    basis: Basis,
    predictor: Predictor,
    answer: Answer,
    slowdown: Slowdown | None,
    num_requests: int | None,
    seed: int,
) -> VerifiedPlan:
    from legato.plan.simulation.setup import Run
    from legato.plan.simulation.verified_plan import (
        enough_requests,
        simulated_service,
        verify_plan,
    )

    run = Run(num_requests or enough_requests(predictor, answer.predicted), seed)
    pools = answer.prefill_workers, answer.decode_workers
    return verify_plan(simulated_service(basis, predictor, *pools, slowdown), predictor, run)


def _traffic(
    inputs: str | None,
    outputs: str | None,
    trace: Path | None,
    rate: float | None,
    prefix_share: float,
) -> Traffic:
    from legato.plan.traffic import Traffic

    input_lengths, output_lengths, lines = read_traffic(inputs, outputs, trace)
    try:
        if lines is not None:
            return Traffic.of_trace(lines, rate, prefix_share)
        if rate is None:
            raise typer.BadParameter("--rate says how many requests come in a second")
        assert input_lengths is not None
        assert output_lengths is not None
        return Traffic.of(rate, input_lengths, output_lengths, prefix_share)
    except ValueError as error:
        raise ServiceError(str(error)) from error


def _basis(
    profile: Path | None,
    gpu: str | None,
    of_gpu: dict[str, Any],
    kv_memory: str | None,
    max_batch_size: int | None,
) -> Basis:
    from legato.cluster.cli.memory_size import parse_size
    from legato.plan.basis import DEFAULT_LINK_BYTES_PER_S, datasheet_basis, profile_basis
    from legato.plan.profile import read_profile

    if (profile is None) == (gpu is None):
        raise typer.BadParameter("--profile or --gpu says what a worker can do: give one of them")
    try:
        kv_bytes = None if kv_memory is None else parse_size(kv_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from None
    if profile is not None:
        if given := [name for name, value in of_gpu.items() if value is not None]:
            raise typer.BadParameter(
                f"--{given[0]} goes with --gpu: the profile has its own, as it was measured"
            )
        return profile_basis(read_profile(profile), kv_bytes, max_batch_size)
    assert gpu is not None
    if of_gpu["model"] is None:
        raise typer.BadParameter("--model says of which model, with --gpu")
    gbit = of_gpu["link"]
    return datasheet_basis(
        gpu,
        of_gpu["model"],
        dtype=of_gpu.get("dtype", "auto"),
        weights=of_gpu.get("weights", "auto"),
        kv_cache=of_gpu.get("kv-cache", "auto"),
        link_bytes_per_s=DEFAULT_LINK_BYTES_PER_S if gbit is None else gbit * 1e9 / 8,
        kv_memory_bytes=kv_bytes,
        max_batch_size=max_batch_size,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ServiceError(f"--output {str(path)!r} cannot be written: {error.strerror}") from error
