"""The options of `legato bench` that are its own, and how they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from legato.cluster.cli.load_options import MAX_RATE_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

Read = TypeVar("Read")

MAX_CONCURRENCY, MAX_REQUESTS = 10_000, 10_000_000
MAX_SECONDS = 1e6

RateOption = Annotated[
    float | None,
    typer.Option(
        min=1e-3,
        max=MAX_RATE_PER_S,
        help="Requests per second, at times of their own (--arrivals), whatever becomes of those "
        "before. Latencies count from these times.",
    ),
]
ArrivalsOption = Annotated[
    str,
    typer.Option(
        metavar="poisson|gamma:CV|constant",
        help="With --rate, how its times scatter: CV is the gaps' deviation over their mean, above "
        "1 for bursts.",
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_CONCURRENCY,
        help="Instead of --rate: so many at a time; the next one is sent when one has ended.",
    ),
]
NumRequestsOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_REQUESTS, help="Send so many that count.", show_default=False),
]
DurationOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=MAX_SECONDS,
        help="Send for so many seconds, behind the warm-up; what is under way then is waited for.",
        show_default=False,
    ),
]
WarmupOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|Ns",
        help="The load's first requests, which do not count: 20, or those of the first 10s. By "
        "default as many as --concurrency, else 0.",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**31 - 1,
        help="The same seed, the same requests: their KV may be cached. By default a new one each "
        "time.",
        show_default=False,
    ),
]
TtftOption = Annotated[
    float | None,
    typer.Option(min=1e-6, max=MAX_SECONDS, help="Good is a first token within so many s."),
]
ItlOption = Annotated[
    float | None,
    typer.Option(
        min=1e-6,
        max=MAX_SECONDS,
        help="Good are answers with a token each so many seconds, on average.",
    ),
]
PercentileOption = Annotated[
    float,
    typer.Option(min=1, max=100, help="So many % of the requests must be good."),
]
MinWindowOption = Annotated[
    float,
    typer.Option(
        min=0.001,
        max=MAX_SECONDS,
        help="No verdict where all of the load was there for fewer seconds.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds for one request.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        help="Instead of --address: any server of OpenAI's API, http://host:port; of several "
        "routers with commas between them.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="With --url, the model's name; by default the only one that the server has.",
        show_default=False,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="Draw the run: .png, .svg or .pdf. Needs matplotlib.",
        show_default=False,
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="Write the run as one page for a browser, which needs nothing else.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def read(option: str, parse: Callable[[str], Read], text: str) -> Read:
    """A wrong one is a usage error."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def read_urls(context: typer.Context, url: str | None, model: str | None) -> list[str]:
    """Where --url says the server is; none without it."""
    if url is None:
        if model is not None:
            raise typer.BadParameter("goes with --url", param_hint="--model")
        return []
    for name in ("address", "port"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"is given beside --{name}: one of them says where the server is",
                param_hint="--url",
            )
    urls = [part.strip().rstrip("/") for part in url.split(",")]
    for part in urls:
        if re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", part) is None:
            raise typer.BadParameter(
                f"must be http://host:port, or several with commas between them, got {part!r}",
                param_hint="--url",
            )
    return urls


def check_folder(option: str, path: Path | None) -> None:
    """What cannot be written is said before the load, not behind it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is in no folder that is there", param_hint=option)
