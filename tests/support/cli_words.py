"""parse_legato: whether the command line takes a command as it stands, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from legato.cluster.cli import app as cli
from legato.cluster.cli.serve_settings import ServeSettings, load

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def parse_legato(words: list[str], config_folder: Path) -> str:
    """What is wrong with `words`, which begin with a command's name; nothing where all is well.

    What `serve` is given is read as settings; a --config file is looked for in `config_folder`.
    """
    group: Any = typer.main.get_command(cli.build_app())
    if words[0] not in group.commands:
        return f"no command {words[0]}"
    try:
        context = group.commands[words[0]].make_context(words[0], list(words[1:]))
    except _USAGE_ERROR as error:
        return str(error)
    if words[0] != "serve":
        return ""
    given = {n: str(v) for n, v in context.params.items() if n in ServeSettings.model_fields and v}
    file = context.params["config"]
    try:
        load(given, None if file is None else config_folder / Path(file).name)
    except ValueError as error:
        return str(error)
    return ""
