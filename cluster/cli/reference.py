"""The pages of the documentation that are made from the program: settings and commands.

python -m legato.cluster.cli.reference docs
"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer.main

from legato.cluster.cli.app import build_app
from legato.cluster.cli.serve_settings import ServeSettings, form_of, value_text
from legato.cluster.cli.settings_command import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 100  # of the help texts

_CONFIGURATION = """\
# Configuration

*Made from the program by `make docs`; a test compares.*

A service is told what to do by options of `legato serve`, by variables of the environment, and by a
YAML file (`--config FILE`, or `LEGATO_CONFIG`). All have the same settings, of one schema:
`kv_memory` in the file is `--kv-memory` as an option and `LEGATO_KV_MEMORY` as a variable. Options
go before variables, variables before the file, the file before the defaults.

```yaml
# legato.yaml
model: ./my-model
prefill: 1
decode: 2
kv_memory: 4GiB
autoscale:
  prefill: 1..4
  decode: 1..8
decode_resources:
  GPU: 0
  CPU: 16
  label:zone: b
```

```sh
legato serve --config legato.yaml --decode 4
LEGATO_KV_WIRE=bfloat16 legato config --config legato.yaml   # what is in force, and from where
```

- A key of the file that is no setting is refused, with the nearest right name, and so is, by every
  command, a `LEGATO_` variable that means nothing to any of them; so is a value that is none. The
  message names the option, the variable, or file and line. An empty variable counts as not set, and
  so does a key without a value.
- Values are read the same way wherever they stand: `no` in the file is what `no` is in a variable.
  A switch takes true, false, yes, no, on, off, 1 or 0.
- The file has at most 64 KiB, two levels, no anchors and no aliases; no key may stand in it twice.
  `autoscale` and the resources may be mappings, as above, or one text as in the option.
- Variables that Kubernetes sets for a Service named legato (`LEGATO_SERVICE_HOST`, …) are left
  alone, but for `LEGATO_PORT`, which it takes for an address of its own: set `enableServiceLinks:
  false` in the pod.
- `legato config` prints what is in force as such a file, with the source of each value; `--json`
  for scripts. Commands that talk to a service know `LEGATO_ADDRESS`, and no setting of a
  service: `LEGATO_PORT` is where `legato serve` listens.
"""

_CLI = """\
# Command line

*Made from the program by `make docs`; a test compares.*

`legato --install-completion` has bash, zsh or fish complete commands, options and their values;
`legato --show-completion` prints the script instead. [configuration.md](configuration.md) has the
settings of `legato serve` by name, [operations.md](operations.md) what to do with them. Where a
command takes `--json`, it prints one JSON object on standard output; what is for people goes to
standard error then.

| exit code | means |
|---|---|
| 0 | done |
| 1 | it could not be done; one line says why, and what to do. `legato doctor`: a problem |
| 2 | a wrong option, variable or line of a file |
| 3 | `legato status`: the service is not ready |
| 130 | interrupted |
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [_CONFIGURATION]
    names = sorted(ServeSettings.model_fields, key=_place)
    for part, of_part in groupby(names, part_of):
        lines += [f"## {part}", "", "| key | value | default | what it is |", "|---|---|---|---|"]
        lines += [_row(name) for name in of_part]
        lines.append("")
    return "\n".join(lines)


def cli_page() -> str:
    """docs/cli.md."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "TERMINAL_WIDTH")}
    os.environ.update(dict.fromkeys(before, str(WIDTH)))
    try:
        group: Any = typer.main.get_command(build_app())
        parts = [_CLI, _help_of(group, None, "legato")]
        parts += [_help_of(group, name, f"legato {name}") for name in group.commands]
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return "\n".join(parts)


def _help_of(group: Any, name: str | None, title: str) -> str:  # noqa: ANN401  # Typer names no type
    context = group.make_context("legato", [], resilient_parsing=True)
    text = group.get_help(context)
    if name is not None:
        command = group.commands[name]
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        text = command.get_help(own)
    body = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"## {title}\n\n```text\n{body}\n```\n"


def _row(name: str) -> str:
    field = ServeSettings.model_fields[name]
    form = form_of(field)
    values = ", ".join(form.choices) if form.choices else form.metavar
    values += f" ({form.limits})" if form.limits else ""
    default = "" if field.is_required() else value_text(field, field.default)
    cells = (f"`{name}`", values, f"`{default}`" if default else "", field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _place(name: str) -> int:
    parts = ("Service", "Access", "Engines", "Autoscaler")
    return parts.index(part_of(name)) * 1000 + list(ServeSettings.model_fields).index(name)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "cli.md": cli_page,
}


def main() -> None:
    """Writes the pages into a folder."""
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page())


if __name__ == "__main__":
    main()
