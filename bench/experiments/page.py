"""write_page: what was found as a Markdown page, with its pictures beside it."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from legato.bench.experiments.svg import svg_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from legato.bench.experiments.finding import Finding, Table
    from legato.bench.experiments.run import Setting

_STEADY = 1.25  # highest over lowest limit up to which nothing is said of it
_BUSY = 0.5  # load over threads from which a run is told to have had company


def write_page(path: Path, setting: Setting, findings: Sequence[Finding]) -> list[Path]:
    """All files that were written: the page, and `NAME-CLAIM.svg` for each claim with a picture.

    Raises:
        OSError: one cannot be written.
    """
    pictures = {}
    for finding in findings:
        if finding.outcome.chart is not None:
            picture = path.with_name(f"{path.stem}-{finding.name}.svg")
            picture.write_text(svg_of(finding.outcome.chart), encoding="utf-8")
            pictures[finding.number] = picture
    names = {number: picture.name for number, picture in pictures.items()}
    path.write_text(page_of(setting, findings, names), encoding="utf-8")
    return [path, *pictures.values()]


def page_of(setting: Setting, findings: Sequence[Finding], pictures: dict[int, str]) -> str:
    """The Markdown. `pictures`: file names beside the page, by number of the claim."""
    seconds = sum(finding.seconds for finding in findings)
    blocks = [
        "# Prefill and decode, measured",
        _paragraph(
            f"""Written by `legato experiments`; do not edit. Model {code(setting.model)}
            ({text(setting.shape)}), weights {code(setting.weights)}, computed in
            {code(setting.dtype)} on {code(setting.device)}: {text(setting.machine)},
            {setting.num_threads} threads; Legato {text(setting.legato_version)}, torch
            {text(setting.torch_version)}. It took {seconds:,.0f} s."""
        ),
        _paragraph(
            """Each claim has checks, whose thresholds stood before anything was measured. A verdict
            follows from the answers alone: a claim *holds* where all are yes, *in part* where some
            are, *does not hold* where at least one is no and none is yes. What is compared was
            measured in turn in the same rounds; figures are medians, with the middle half of the
            rounds in brackets. A check is *unclear* where its threshold lies within that half, for
            the rounds disagree, and where the time was enough for one round alone."""
        ),
        _paragraph(_steadiness(setting)),
        _table(
            ("", "claim", "verdict"),
            [
                (str(f.number), f"[{text(f.claim)}](#{_anchor(f)})", f"**{f.verdict.value}**")
                for f in findings
            ],
        ),
        *(block for finding in findings for block in _section(finding, pictures)),
    ]
    return "\n\n".join(blocks) + "\n"


def _section(finding: Finding, pictures: dict[int, str]) -> list[str]:
    outcome = finding.outcome
    blocks = [
        f"## {_title(finding)}",
        _paragraph(text(finding.claim)),
        _paragraph(f"**Verdict: {finding.verdict.value}** — {text(finding.reason)}."),
        _table(
            ("check, as it stood before", "measured", "met"),
            [(text(c.statement), text(c.measured), c.answer.value) for c in outcome.checks],
        ),
    ]
    if finding.number in pictures and outcome.chart is not None:
        blocks.append(f"![{text(outcome.chart.title)}]({pictures[finding.number]})")
    if outcome.table is not None:
        blocks.append(_cells(outcome.table))
    return blocks + [_paragraph(text(note)) for note in outcome.notes]


def _steadiness(setting: Setting) -> str:
    words = (
        f"The machine over the run: memory reads at {setting.bandwidth}, matrix products at "
        f"{setting.peak}"
    )
    if setting.load_before is not None and setting.load_after is not None:
        words += (
            f"; load {setting.load_before:.1f} before and {setting.load_after:.1f} after, of which "
            "the latter is mostly the run's own"
        )
        if setting.load_before > _BUSY * setting.num_threads:
            words += (
                ". **The machine was busy with something else when the run began**: times are too "
                "long, and the more so the more cores a measurement uses. Run it again when it is "
                "idle before you quote it"
            )
    if setting.limits_ratio > _STEADY:
        words += (
            f". **The machine's own speed changed by a factor of {setting.limits_ratio:.2g} during "
            "the run**: figures of different claims are not to be compared with each other"
        )
    return words + "."


def code(value: str) -> str:
    """In backticks, whatever stands in it."""
    return f"`{_one_line(value).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def text(value: str) -> str:
    """Nothing in it is Markdown or HTML, or ends a table's cell."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", _one_line(value))


def _one_line(value: str) -> str:
    return " ".join(value.split())


def _title(finding: Finding) -> str:
    return f"{finding.number}. {finding.name.replace('-', ' ').capitalize()}"


def _anchor(finding: Finding) -> str:
    """As GitHub makes it of the title."""
    return f"{finding.number}-{finding.name}"


def _paragraph(words: str) -> str:
    return textwrap.fill(_one_line(words), 100, break_on_hyphens=False, break_long_words=False)


def _cells(table: Table) -> str:
    return _table([text(c) for c in table.head], [[text(c) for c in row] for row in table.rows])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
