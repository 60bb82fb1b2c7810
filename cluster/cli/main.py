"""The command `legato`: its subcommands, and how their errors reach a person."""

from __future__ import annotations

import sys
from typing import cast

import typer

from legato.cluster.cli.batch import batch
from legato.cluster.cli.certs import certs
from legato.cluster.cli.client_flags import secured
from legato.cluster.cli.demo import demo
from legato.cluster.cli.generate import generate
from legato.cluster.cli.operate import scale, status, stop
from legato.cluster.cli.role import role
from legato.cluster.cli.serve import serve
from legato.cluster.errors import ServiceError

# Typer shows these in a box of seven lines, and has no public name for all of them.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    name="legato",
    help="LLM serving with prefill and decode on separate workers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (serve, generate, batch, status, scale, role, stop, demo, certs):
    app.command()(secured(_command))


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """LLM serving with prefill and decode on separate workers."""
    if version:
        from legato.cluster.version import legato_version

        print(legato_version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Runs the command line; one line on stderr and a non-zero code where something is wrong."""
    try:
        code = app(prog_name="legato", standalone_mode=False)
    except ServiceError as error:
        _fail(str(error), 1)
    except typer.Abort:  # Ctrl-C
        sys.exit(130)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "legato"
        _fail(f"{_sentence(error)} (see `{command} --help`)", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(error: Exception) -> str:
    """What is wrong, with the value that was given: Typer's own checks name the limit alone."""
    sentence = str(error.format_message() if hasattr(error, "format_message") else error)
    checks = getattr(error.__cause__, "errors", None)  # pydantic's
    given = repr(checks()[0]["input"]) if checks is not None else ""
    return sentence if given in sentence else f"{sentence.rstrip('.')}, got {given}"


def _fail(message: str, code: int) -> None:
    print(f"legato: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
