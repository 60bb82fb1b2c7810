"""Documents and deployment files say what is true: commands, options, targets, links, fields."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from legato.cluster.cli import main as cli
from legato.protos import common_pb2, generation_pb2

ROOT = Path(__file__).parents[2]
DEPLOYED = (path for path in ROOT.glob("deploy/*") if path.is_file())
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *DEPLOYED])
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(cli.build_app()), "commands", {})


def legato_lines(text: str) -> list[list[str]]:
    """Each `legato …` that a reader may type, as words."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[\s`/=])legato (?=[a-z])([^`\n]*)", text)
    lines = [shlex.split(line, comments=True) for line in found]
    return [words for words in lines if words and words[0] in COMMANDS]


def wrong_options(words: list[str]) -> list[str]:
    options = {o for p in COMMANDS[words[0]].params for o in (*p.opts, *p.secondary_opts)}
    given = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
    return [word for word in given if word not in options | {"--help"}]


def test_there_are_commands_to_check() -> None:
    assert set(COMMANDS) == set(cli.COMMANDS) >= {"serve", "generate", "chat", "top", "doctor"}
    readme = legato_lines((ROOT / "README.md").read_text())
    assert {words[0] for words in readme} >= {"serve", "generate", "status", "scale", "stop"}
    assert wrong_options(["serve", "--model", "x", "--such-an-option"]) == ["--such-an-option"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(path: Path) -> None:
    wrong = {" ".join(w): wrong_options(w) for w in legato_lines(path.read_text())}
    assert {line: options for line, options in wrong.items() if options} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_in_documents_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), flags=re.MULTILINE))
    assert named <= targets


def test_files_named_in_documents_exist() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS if path.suffix == ".md")
    named = set(
        re.findall(r"`((?:cluster|worker|kernels|protos|bench|tests|docs)/[\w/.*]+)`", text)
    )
    assert named
    assert [name for name in named if not list(ROOT.glob(name))] == []


def test_the_api_page_names_every_field() -> None:
    text = (ROOT / "docs/api.md").read_text()
    messages = (common_pb2.SamplingParams.DESCRIPTOR, generation_pb2.GenerateRequest.DESCRIPTOR)
    fields = {field.name for message in messages for field in message.fields}
    assert {field for field in fields if f"`{field}" not in text} == set()


def test_the_python_example_runs_up_to_the_connection() -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    compile(example, "README.md", "exec")
    imports = "\n".join(line for line in example.splitlines() if line.startswith("from "))
    names = dict(re.findall(r"from (\S+) import (.+)", imports))
    for module, imported in names.items():
        loaded = __import__(module, fromlist=["_"])
        assert all(hasattr(loaded, name.strip()) for name in imported.split(","))


def test_the_cluster_file_is_what_ray_expects() -> None:
    cluster = yaml.safe_load((ROOT / "deploy/ray-cluster.yaml").read_text())
    assert cluster["provider"]["type"] == "local"
    assert {"cluster_name", "auth", "head_start_ray_commands", "worker_start_ray_commands"} <= set(
        cluster
    )


def test_the_unit_file_starts_the_command() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys are case-sensitive
    unit.read(ROOT / "deploy/legato.service")
    assert "legato serve --model" in unit["Service"]["ExecStart"]
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_image_holds_every_package() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", dockerfile, flags=re.MULTILINE))
    assert copied == {"bench", "cluster", "kernels", "plan", "protos", "text", "worker"}


def test_ci_calls_make_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
