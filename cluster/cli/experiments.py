"""`legato experiments`: tries what is said about prefill and decode on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from rich.console import Console

    from legato.bench.experiments.experiment import Experiment
    from legato.bench.experiments.finding import Finding
    from legato.bench.experiments.run import Setting

_ALL = tuple(range(1, 11))
_COLORS = {"holds": "green", "holds in part": "yellow", "does not hold": "red"}


def experiments(
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a hub id, a .gguf file, or `demo`.")
    ] = "demo",
    only: Annotated[
        str | None,
        typer.Option(help="Numbers of claims, such as 1,3,8; without it all.", show_default=False),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=86400,
            help="For all measurements together, loading apart. One round is made in any case; "
            "what was left out is said.",
        ),
    ] = 600.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write a Markdown page here, and its pictures beside it (SVG).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As of `legato serve`.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Cores to use. Without it all that this process may.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Try ten claims about prefill and decode with a model, on this machine.

    Each claim has thresholds, which are printed before it is measured; the verdict follows from
    the measured numbers alone: holds, holds in part, does not hold, could not be measured. Nothing
    else should run meanwhile.

    Examples:

        legato experiments --only 1,4

        legato experiments --model demo --dtype bfloat16 -o experiments.md

        legato experiments --model ./my-model --seconds 1800 --json
    """
    from rich.console import Console

    numbers = _numbers(only)
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {output.parent}", param_hint="--output")
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    shown = told if as_json else Console(highlight=False, soft_wrap=True)
    setting, findings = _run(model, device, dtype, threads, numbers, seconds, shown)
    if output is not None:
        from legato.bench.experiments.page import write_page

        try:
            files = write_page(output, setting, findings)
        except OSError as error:
            raise ServiceError(f"--output {output}: {error.strerror}") from error
        told.print(f"written: {', '.join(map(str, files))}", markup=False)
    if as_json:
        print(
            json.dumps({"setting": setting.as_json(), "findings": [f.as_json() for f in findings]})
        )


def _numbers(only: str | None) -> list[int]:
    """As they are given, each once.

    Raises:
        typer.BadParameter: one is none.
    """
    if only is None:
        return list(_ALL)
    numbers: dict[int, None] = {}
    for word in only.split(","):
        if not word.strip().isascii() or not word.strip().isdigit() or int(word) not in _ALL:
            raise typer.BadParameter(
                f"must be numbers from {_ALL[0]} to {_ALL[-1]} with commas between, such as 1,3, "
                f"got {only!r}",
                param_hint="--only",
            )
        numbers[int(word)] = None
    return list(numbers)


def _run(
    model: str,
    device: str,
    dtype: str,
    threads: int | None,
    numbers: list[int],
    seconds: float,
    shown: Console,
) -> tuple[Setting, list[Finding]]:
    from legato.bench.experiments.lab import Lab, LabSettings, usable_cores
    from legato.bench.experiments.run import run_experiments
    from legato.cluster.version import legato_version

    cores = usable_cores()
    if threads is not None and threads > cores:
        raise typer.BadParameter(
            f"this process may use {cores} cores, got {threads}", param_hint="--threads"
        )
    if threads is None:
        threads = cores
    # Before torch is imported: OpenMP reads it once.
    os.environ["OMP_NUM_THREADS"] = str(threads)

    def start(experiment: Experiment) -> None:
        shown.print(f"\n{experiment.number}. {experiment.claim}", markup=False, style="bold")
        for letter, criterion in zip(ascii_lowercase, experiment.criteria, strict=False):
            shown.print(f"   {letter}) to be met: {criterion}", markup=False)

    def end(finding: Finding) -> None:
        _show(finding, shown)

    try:
        lab = Lab(LabSettings(model, device, dtype, threads))
        return run_experiments(lab, numbers, seconds, legato_version(), on_start=start, on_end=end)
    except ValueError as error:
        raise ServiceError(str(error)) from error


def _show(finding: Finding, console: Console) -> None:
    """Measured and verdict, below the claim."""
    verdict = finding.verdict.value
    for letter, check in zip(ascii_lowercase, finding.outcome.checks, strict=False):
        console.print(f"   {letter}) {check.answer.value}: {check.measured}", markup=False)
    color = _COLORS.get(verdict, "magenta")
    console.print(f"   {verdict}", markup=False, style=f"bold {color}", end="")
    console.print(f": {finding.reason} ({finding.seconds:.1f} s)", markup=False)
    for note in finding.outcome.notes:
        console.print(f"   {note}", markup=False, style="dim")
