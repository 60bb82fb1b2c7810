"""Documents and deployment files say what is true: commands, options, targets, links, fields."""

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
import yaml

from legato.cluster.cli import app as cli
from legato.cluster.cli.serve_settings import ServeSettings
from legato.cluster.cli.variables import OTHER_VARIABLES, variable_of
from legato.cluster.metrics.catalogue import METRICS as CATALOGUE
from legato.protos import common_pb2, generation_pb2

ROOT = Path(__file__).parents[2]
# Manifests and units have tests of their own, which read their commands as they are run.
DEPLOYED = [p for p in [*ROOT.glob("deploy/*"), *ROOT.glob("deploy/examples/*")] if p.is_file()]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *DEPLOYED])
PICTURES = sorted(ROOT.glob("docs/**/*.svg"))
METRICS = {metric.name for metric in CATALOGUE}
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


def anchors(text: str) -> set[str]:
    """Of the headings, as they are linked to."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    words = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_pages_find_their_heading(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
    wrong = []
    for file, anchor in links:
        target = path.parent / file if file else path
        if target.suffix == ".md" and anchor not in anchors(target.read_text()):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []
    assert anchors("# A `b`: c\n```\n# no\n```\n") == {"a-b-c"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_and_variables_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"\b(legato_[a-z_]+|vllm:[a-z_]+)", text))
    wrong = {
        name for name in named if re.sub(r"_(bucket|count|sum|total)$", "", name) not in METRICS
    }
    assert {name for name in wrong if not name.endswith("_")} == set()
    known = OTHER_VARIABLES | {variable_of(name) for name in ServeSettings.model_fields}
    variables = set(re.findall(r"\bLEGATO_[A-Z_]*[A-Z]\b", text))
    kubernetes = {name for name in variables if name.endswith("_SERVICE_HOST")}
    assert variables - kubernetes <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_is_python(path: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("legato."):
                module = importlib.import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_pictures_can_be_read_and_say_what_they_show(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    names = {child.tag.rpartition("}")[2]: child.text for child in root}
    assert names["title"]
    assert names["desc"]
    assert any(path.name in page.read_text() for page in DOCUMENTS), "nobody shows it"


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


def test_ci_calls_make_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
