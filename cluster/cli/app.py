"""The command `legato`: its subcommands, and how their errors reach a person."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

import typer

from legato.cluster.cli.client_flags import secured
from legato.cluster.cli.main import INTERRUPTED
from legato.cluster.cli.variables import checks_variables
from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG_USE = 2  # exit code: a wrong option, variable or line of a file
# Of the library's that checks options, in the words that all other checks have.
_WORDS = (
    ("Input should be greater than or equal to", "must be at least"),
    ("Input should be less than or equal to", "must be at most"),
    ("Input should be a valid number, unable to parse string as a number", "must be a number"),
    (
        "Input should be a valid integer, unable to parse string as an integer",
        "must be a whole number",
    ),
    ("Input should be", "must be"),
    ("Value error, ", ""),
)
# Typer shows these in a box of seven lines, and has no public name for all of them.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

# Where each command is. Only the one that is typed is loaded: `legato status` waits for no other.
COMMANDS = {
    "serve": "serve",
    "generate": "generate",
    "chat": "chat",
    "batch": "batch",
    "status": "status",
    "top": "top",
    "scale": "scale",
    "role": "role",
    "drain": "drain",
    "stop": "stop",
    "config": "show_config",
    "doctor": "doctor",
    "bench": "bench",
    "profile": "profile",
    "plan": "plan",
    "experiments": "experiments",
    "certs": "certs",
    "demo": "demo",
}


def build_app(wanted: str | None = None) -> typer.Typer:
    """With one command only, where it is known; else with all."""
    app = typer.Typer(
        name="legato",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut the names of options where a terminal is narrow
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True, help=_help(_legato))(_legato)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        command = getattr(import_module(f"legato.cluster.cli.{COMMANDS[name]}"), name)
        app.command(name, help=_help(command))(checks_variables(secured(command)))
    return app


def _help(command: Callable[..., object]) -> str:
    """Its docstring, with the examples as they are: no line of theirs is broken."""
    text, title, examples = inspect.cleandoc(command.__doc__ or "").partition("\nExample")
    if not title:
        return text
    first, *lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return "\n".join([text, f"Example{first}", "", "\b", *(f"  {line}" for line in lines)])


def _legato(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """LLM serving with prefill and decode on separate workers.

    Examples:

        legato doctor

        legato serve --model demo

        legato chat

        legato serve --help
    """
    if version:
        from legato.cluster.version import legato_version

        print(legato_version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def load_app() -> Callable[[], int]:
    """Of the command that was typed; it returns the exit code, and tells what is wrong itself."""
    completing = "_LEGATO_COMPLETE" in os.environ
    app = build_app(None if completing else next(iter(sys.argv[1:]), None))
    return lambda: _run(app)


def _run(app: typer.Typer) -> int:
    try:
        code = app(prog_name="legato", standalone_mode=False)
    except WrongInputError as error:
        return _fail(str(error), WRONG_USE)
    except ServiceError as error:
        return _fail(str(error), 1)
    except typer.Abort:  # Ctrl-C
        return INTERRUPTED
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "legato"
        return _fail(f"{_sentence(error)} (see `{command} --help`)", WRONG_USE)
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str:
    """What is wrong, with the value that was given: Typer's own checks name the limit alone."""
    sentence = str(error.format_message() if hasattr(error, "format_message") else error)
    for theirs, ours in _WORDS:
        sentence = sentence.replace(theirs, ours)
    checks = getattr(error.__cause__, "errors", None)  # pydantic's
    given = repr(checks()[0]["input"]) if checks is not None else ""
    return sentence if given in sentence else f"{sentence.rstrip('.')}, got {given}"


def _fail(message: str, code: int) -> int:
    print(f"legato: {message}", file=sys.stderr)
    return code
