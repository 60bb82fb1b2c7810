"""`legato batch`: a file of requests in, a file of answers out, at batch priority."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.client_flags import chosen_access, name_sources
from legato.cluster.cli.connection import AddressOption, PortOption, choose_address, source_of
from legato.cluster.cli.status import ask_each
from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from legato.cluster.batch.batch_input import BatchInput
    from legato.cluster.batch.batch_output import BatchOutput
    from legato.cluster.batch.batch_run import BatchOutcome
    from legato.cluster.cli.batch_progress import BatchProgress

MAX_CONCURRENCY = 1024
SOME_FAILED, SOME_UNDONE = 1, 3  # exit codes
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def batch(
    lines: Annotated[
        Path, typer.Argument(dir_okay=False, help="Requests, one a line: OpenAI's batch format.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Answers, one a line, in the order in which they are ready. Lines that it has "
            "are not asked again.",
        ),
    ],
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="LEGATO_URL",
            help="The service's HTTP endpoint, http://host:port, in the place of --address; of "
            "several routers with commas between them. By default the service is asked for it.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(min=1, max=MAX_CONCURRENCY, help="Requests in flight at most."),
    ] = 64,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Stop after so long: 90, 90s, 30m, 2h or 1d. What is not done then can be done "
            "by the same command.",
            show_default=False,
        ),
    ] = None,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors",
            help="Ask lines again that have an error in the place of an answer. Those that were "
            "changed since are asked again without it.",
        ),
    ] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Answer a file of requests, at batch priority: they fill what interactive requests leave.

    Where it is interrupted, in whatever way, the same command goes on.

    Exit codes: 0 all lines have answers; 1 some have errors in the place of one; 3 the deadline
    came before some lines.

    Examples:

        legato batch in.jsonl -o out.jsonl

        legato batch in.jsonl -o out.jsonl --deadline 8h --concurrency 256

        legato batch in.jsonl -o out.jsonl --url https://llm.example.com
    """
    given = {name for name in ("url", "address", "port") if _is_typed(context, name)}
    if "url" in given and len(given) > 1:
        raise typer.BadParameter(
            "is given beside --address or --port: one of them says where the service is",
            param_hint="--url",
        )
    # What is typed goes before what the environment says.
    urls = None if url is None or given & {"address", "port"} else _urls(url)
    where = choose_address(address, port)
    limit_s = None if deadline is None else _seconds(deadline)
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    from legato.cluster.batch.batch_input import BatchInput
    from legato.cluster.batch.batch_output import BatchOutput

    if output.exists() and lines.exists() and output.samefile(lines):
        raise WrongInputError(f"--output {str(output)!r} is the file of requests itself")
    with BatchInput(lines) as requests:
        hashes = {ref.custom_id: ref.request_hash for ref in requests.lines}
        with BatchOutput(output, hashes, retries_errors=retry_errors) as finished:
            if urls is None and len(finished.finished) < len(requests.lines):
                urls = _ask_urls(where)
            sys.exit(_run(requests, finished, urls or [], concurrency, deadline_s))


def _run(
    requests: BatchInput,
    finished: BatchOutput,
    urls: list[str],
    concurrency: int,
    deadline_s: float | None,
) -> int:
    from legato.cluster.cli.batch_progress import BatchProgress

    total = len(requests.lines)
    with BatchProgress(total, len(finished.finished), finished.num_failed) as progress:
        if again := finished.num_retried:
            progress.tell(f"{_lines(again)} with errors {_is_are(again)} asked again")
        try:
            outcome = asyncio.run(
                _answer(requests, finished, urls, concurrency, deadline_s, progress)
            )
        finally:
            progress.tell(f"{len(finished.finished)} of {_lines(total)} done")
    if failed := finished.num_failed:
        print(
            f"legato: {_lines(failed)} {'has an error' if failed == 1 else 'have errors'}: mend "
            "what is wrong in the file of requests, and the same command asks what was changed "
            "again; --retry-errors asks all of them again",
            file=sys.stderr,
        )
    if outcome.num_undone:
        print(
            f"legato: the deadline came before {_lines(outcome.num_undone)}; the same command goes "
            "on from there",
            file=sys.stderr,
        )
        return SOME_UNDONE
    return SOME_FAILED if finished.num_failed else 0


async def _answer(
    requests: BatchInput,
    finished: BatchOutput,
    urls: list[str],
    concurrency: int,
    deadline_s: float | None,
    progress: BatchProgress,
) -> BatchOutcome:
    from legato.cluster.batch.batch_endpoint import BatchEndpoint
    from legato.cluster.batch.batch_run import BatchOutcome, run_batch

    if len(finished.finished) == len(requests.lines):
        return BatchOutcome()
    access = chosen_access()
    try:
        access.check_urls(urls)
        verify = True if access.tls is None else access.tls.ssl_context()
    except ValueError as error:
        raise WrongInputError(name_sources(str(error))) from error
    async with BatchEndpoint(
        urls, concurrency, deadline_s, access.token, verify=verify
    ) as endpoint:
        await endpoint.check()
        return await run_batch(
            requests, finished, endpoint, concurrency=concurrency, on_line=progress.line
        )


def _lines(count: int) -> str:
    return f"{count} line" if count == 1 else f"{count} lines"


def _is_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _ask_urls(where: str) -> list[str]:
    """The HTTP endpoints of the routers at `where` that answer."""
    scheme = "http" if chosen_access().tls is None else "https"
    urls = [
        f"{scheme}://{address.rpartition(':')[0]}:{told.router.http_port}"
        for address, told in ask_each(where.split(",")).items()
        if told is not None and told.router.http_port
    ]
    if not urls:
        raise ServiceError(
            f"the service at {where} has no HTTP endpoint (--no-http), which a batch needs"
        )
    return urls


def _urls(text: str) -> list[str]:
    urls = [part.strip().rstrip("/").removesuffix("/v1") for part in text.split(",")]
    for url in urls:
        if re.fullmatch(r"https?://[^\s/?#]+", url) is None:
            raise typer.BadParameter(
                f"must be http://host:port, or several with commas between them, got {url!r}",
                param_hint=source_of("--url", "LEGATO_URL", text),
            )
    return urls


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds <= 1e8:
        raise typer.BadParameter(
            f"must be a time such as 90, 90s, 30m, 2h or 1d, got {text!r}", param_hint="--deadline"
        )
    return seconds
