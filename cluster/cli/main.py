"""The command `legato`: its subcommands, and how their errors reach a person."""

from __future__ import annotations

import os
import sys

import typer

from legato.cluster.cli.demo import demo
from legato.cluster.cli.generate import generate
from legato.cluster.cli.operate import scale, status, stop
from legato.cluster.cli.serve import serve
from legato.cluster.errors import ServiceError

app = typer.Typer(
    name="legato",
    help="LLM serving with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (serve, generate, status, scale, stop, demo):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """LLM serving with prefill and decode on separate workers."""
    if version:
        from legato.cluster.version import legato_version

        print(legato_version())
        raise typer.Exit


def main() -> None:
    """Runs the command line; one line on stderr and a non-zero code where something is wrong."""
    try:
        app()
    except ServiceError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has left (`legato generate … | head`). What is still buffered
        # goes nowhere, quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail(message: str) -> None:
    print(f"legato: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
