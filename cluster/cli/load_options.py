"""The options that say what traffic is: of `legato bench`, which sends it, and of `legato plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.plan.lengths import Lengths
    from legato.plan.trace import TraceLine

MAX_RATE_PER_S = 1e6
_FORMS = "512, 100..900 (each as likely) or lognormal:MEDIAN:SIGMA:MAX"
InputOption = Annotated[
    str | None,
    typer.Option(
        "--input-tokens",
        metavar="N|N..M|lognormal:…",
        help=f"Tokens of a prompt: {_FORMS}.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output-tokens",
        metavar="N|N..M|lognormal:…",
        help="Tokens of an answer, in the same forms.",
        show_default=False,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help='Instead of these a JSON line for each request: {"at_s": 0.5, "input_tokens": 120, '
        '"output_tokens": 40}; at_s may be left out of all.',
    ),
]
PrefixOption = Annotated[
    float,
    typer.Option(min=0, max=1, help="Of a prompt's tokens, the share that all prompts begin with."),
]


def read_lengths(option: str, text: str | None) -> Lengths | None:
    """None where nothing is given; a wrong one is a usage error."""
    from legato.plan.lengths import Lengths

    if text is None:
        return None
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def read_traffic(
    inputs: str | None, outputs: str | None, trace: Path | None
) -> tuple[Lengths | None, Lengths | None, list[TraceLine] | None]:
    """The lengths, or the trace; one of the two."""
    from legato.plan.trace import read_trace

    if trace is None:
        if inputs is None or outputs is None:
            raise typer.BadParameter(
                "--input-tokens and --output-tokens say how long prompts and answers are; or "
                "--trace has both"
            )
        return (
            read_lengths("--input-tokens", inputs),
            read_lengths("--output-tokens", outputs),
            None,
        )
    if inputs is not None or outputs is not None:
        raise typer.BadParameter(
            "--trace has the lengths: leave out --input-tokens and --output-tokens"
        )
    try:
        return None, None, read_trace(trace)
    except ValueError as error:
        raise ServiceError(str(error)) from None
