"""What documents name exists: anchors, commands as typed, settings, metrics, Python, pictures."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main

from legato.cluster.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
PICTURES = sorted(ROOT.glob("docs/pictures/*.svg"))
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(cli.build_app()), "commands", {})
SVG = "{http://www.w3.org/2000/svg}"


def without_fences(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def fences(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    return [body for language, body in found if language in languages]


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    made: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_fences(path.read_text()), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeats = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", one) is not None for one in made)
        made.add(f"{anchor}-{repeats}" if repeats else anchor)
    return made


def broken_links(text: str, page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    return broken


def refused_commands(text: str) -> dict[str, str]:
    """Each `legato …` of a shell block that the program's own parser would not take."""
    refused = {}
    for block in fences(text, "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
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


def sources(*patterns: str) -> str:
    return "\n".join(path.read_text() for one in patterns for path in ROOT.glob(one))


def unknown_names(text: str) -> set[str]:
    """Variables, options and metrics in prose that the program's sources do not have."""
    page_of_settings = (ROOT / "docs/configuration.md").read_text()
    settings = {name.upper() for name in re.findall(r"^\| `(\w+)` \|", page_of_settings, re.M)}
    program = sources("cluster/**/*.py", "worker/**/*.py", "kernels/**/*.py", "bench/**/*.py")
    program += sources("Makefile", "setup.py", "tests/**/*.py", "protos/*.proto")
    metrics = set(re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.M))
    unknown = {
        name
        for name in re.findall(r"\bLEGATO_[A-Z0-9_]*[A-Z0-9]\b", text)
        if name.removeprefix("LEGATO_") not in settings and name not in program
    }
    for name in re.findall(r"`((?:legato_|vllm:|gen_ai_)\w+)`", text):
        if name not in metrics and name not in program:
            unknown.add(name)
    return unknown


def wrong_python(text: str) -> list[str]:
    wrong = []
    for block in fences(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("legato"):
                module = importlib.import_module(node.module or "")
                wrong += [one.name for one in node.names if not hasattr(module, one.name)]
    return wrong


def wrong_picture(text: str) -> list[str]:
    root = ElementTree.fromstring(text)
    return [tag for tag in ("title", "desc") if not (root.findtext(SVG + tag) or "").strip()]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert broken_links(text, page) == []
    assert refused_commands(text) == {}
    assert unknown_names(text) == set()
    assert wrong_python(text) == []


@pytest.mark.parametrize("picture", PICTURES, ids=named)
def test_a_picture_can_be_read_aloud(picture: Path) -> None:
    assert wrong_picture(picture.read_text()) == []


def test_errors_are_found() -> None:
    page = ROOT / "docs/index.md"
    assert broken_links("[a](absent.md) [b](faq.md#absent) [c](faq.md)", page) == [
        "absent.md",
        "faq.md#absent",
    ]
    assert len(refused_commands("```sh\nlegato serv\nlegato serve --no-such 1\n```")) == 2
    assert len(refused_commands("```sh\nlegato generate a --max-tokens x\n```")) == 1
    text = "LEGATO_" + "NO_SUCH, `legato_" + "no_such_total`, LEGATO_KV_MEMORY, `legato_ready`"
    assert unknown_names(text) == {"LEGATO_" + "NO_SUCH", "legato_" + "no_such_total"}
    assert wrong_python("```python\nfrom legato.cluster.client import Cliant\n```") == ["Cliant"]
    with pytest.raises(SyntaxError):
        wrong_python("```python\ndef x(:\n```")
    assert wrong_picture('<svg xmlns="http://www.w3.org/2000/svg"><title>a</title></svg>') == [
        "desc"
    ]
    with pytest.raises(ElementTree.ParseError):
        wrong_picture("<svg>")
