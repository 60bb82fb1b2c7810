"""`legato config`: what is in force, and where each value comes from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from legato.cluster.cli.serve_settings import Loaded, ServeSettings
from legato.cluster.cli.settings_command import takes_settings


@takes_settings
def config(
    loaded: Loaded,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object: for each setting its value and source.")
    ] = False,
) -> None:
    """Show what `legato serve` would be told, and by whom.

    Each setting with the option, variable or line of the file that it comes from. Nothing is
    started. What is printed is a file for --config itself.

    Examples:

        legato config --config legato.yaml --decode 4

        LEGATO_KV_MEMORY=4GiB legato config --model demo --json
    """
    rows = [
        (name, loaded.text_of(name), loaded.places.get(name, "default"))
        for name in ServeSettings.model_fields
    ]
    if as_json:
        told = {name: {"value": text or None, "source": place} for name, text, place in rows}
        print(json.dumps(told, ensure_ascii=False, indent=2))
        return
    shown = [
        (f"{name}: {_quoted(text)}" if text else f"# {name}:", place) for name, text, place in rows
    ]
    width = max(len(line) for line, _ in shown if len(line) <= 48)
    for line, place in shown:
        print(f"{line:{width}}  # {place}")


def _quoted(text: str) -> str:
    """As YAML takes it back: as it is, where that is plain."""
    return (
        text
        if text.replace("_", "").replace(".", "").replace("-", "").isalnum()
        else json.dumps(text, ensure_ascii=False)
    )
