"""`legato doctor`: whether this machine is fit to serve, and what to do where it is not."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from legato.cluster.cli.doctor_checks import Finding, Level, check_machine
from legato.cluster.cli.doctor_measurements import check_disaggregation, check_links, check_ray

_MARKS = {
    Level.OK: ("ok", "green"),
    Level.WARNING: ("warning", "yellow"),
    Level.PROBLEM: ("problem", "red"),
}


def doctor(
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where a router is to listen.")
    ] = 50051,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster to be joined, as of `legato serve`: its links are measured."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(help="See for some seconds whether disaggregation pays on this machine."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine, and say what to do.

    Each line is ok, a warning or a problem, with what mends it. Exit code 1 where there is a
    problem.

    Examples:

        legato doctor

        legato doctor --ray-address auto

        legato doctor --no-measure --json | jq '.findings[] | select(.level != "ok")'
    """
    findings = check_machine(port)
    findings += check_ray(ray_address)
    _tell(findings, as_json=as_json)
    slow = []
    if ray_address is not None:
        slow += check_links(ray_address)
        _tell(slow, as_json=as_json)
    if measure:
        paying = [check_disaggregation()]
        _tell(paying, as_json=as_json)
        slow += paying
    findings += slow
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        told = {
            "ok": not num_problems,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(told, ensure_ascii=False, indent=2))
    if num_problems:
        raise typer.Exit(1)


def _tell(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    for finding in findings:
        word, style = _MARKS[finding.level]
        fix = f"; {finding.fix}" if finding.fix else ""
        console.print(Text.assemble((f"{word:8}", style), f"{finding.name}: {finding.text}{fix}"))
