"""Every `legato …` that stands in a shell block is taken by the program's own parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from legato.cluster.cli import app as cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(cli.build_app()), "commands", {})


def refused_commands(text: str) -> dict[str, str]:
    """Lines of shell blocks, with what the parser says against them."""
    refused = {}
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:\S*/)?legato (.+)", line)
        if not found:
            continue
        words = shlex.split(re.sub(r"[|&<>].*", "", found[1]), comments=True)
        if words[0].startswith("-"):
            continue  # --help, --version, completion
        if words[0] not in COMMANDS:
            refused[line.strip()] = "no such command"
            continue
        try:
            with COMMANDS[words[0]].make_context(words[0], words[1:]):
                pass
        except typer.Exit:
            pass  # --help
        except Exception as error:
            if not hasattr(error, "format_message"):  # the parser's own errors have it
                raise
            refused[line.strip()] = error.format_message()
    return refused


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    assert refused_commands(page.read_text()) == {}


@pytest.mark.parametrize(
    "line",
    ["serv --model demo", "serve --no-such 1", "generate a --max-tokens x", "generate", "role a"],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert len(refused_commands(f"```sh\nlegato {line}\nlegato status\n```")) == 1
