"""Units, image, example configurations, and every command in the deployment files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_words import parse_legato
from deploy_files import (
    DEPLOY,
    Command,
    pod_commands,
    ray_cluster,
    ray_up_commands,
    read_unit,
    split_shell,
    unit_commands,
)

from legato.cluster.cli.serve_settings import load

ROOT = DEPLOY.parent
EXAMPLES = DEPLOY / "examples"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
HARDENED = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}


def image_commands() -> list[Command]:
    """Its RUN lines, and the `docker run … legato serve …` of what is written about it."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    runs = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    return [command for line in runs for command in split_shell("Dockerfile", line)]


def all_commands() -> list[Command]:
    units = [command for path in UNITS for command in unit_commands(path)]
    return [*pod_commands(ray_cluster()), *ray_up_commands(), *units, *image_commands()]


def test_every_command_is_one_that_legato_takes() -> None:
    ours = [command for command in all_commands() if command.words[0] == "legato"]
    wrong = {c.place: told for c in ours if (told := parse_legato([*c.words[1:]], EXAMPLES))}
    assert wrong == {}
    assert {command.words[1] for command in ours} == {"serve", "stop", "drain"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("legato drain --nodes=here", "No such option"),
        ("legato drian --node=here", "no command drian"),
        ("legato stop --drain=soon", "should be a valid number"),
        ("legato serve --model=m --autoscale=prefill=1..4,decode=1..8", "MIN..MAX"),
        ("legato serve --model=m --await-nodes=3", "it needs --ray-address"),
        ("legato serve --config /etc/legato/no-machine.yaml", "cannot be read"),
        ("FOO=1 exec legato serve --model=m --prefil=1", "No such option"),
    ],
)
def test_a_wrong_command_is_found(line: str, told: str) -> None:
    [command] = split_shell("here", line)
    assert told in parse_legato([*command.words[1:]], EXAMPLES)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_settings_in_force(path: Path) -> None:
    loaded = load({}, path)
    assert loaded.config.model == "/models/m"
    keys = set(yaml.safe_load(path.read_text()))
    assert {name for name, place in loaded.places.items() if str(path) in place} == keys
    named = re.findall(r"legato serve --config (\S+\.yaml)", path.read_text())
    assert named == [path.name]


def test_the_examples_fit_their_machines() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "one-machine.yaml",
        "two-machines.yaml",
        "eight-gpus.yaml",
    }
    eight = load({}, EXAMPLES / "eight-gpus.yaml").config
    assert (eight.num_workers, eight.engine.device) == (8, "cuda")
    two = load({}, EXAMPLES / "two-machines.yaml").config
    assert two.await_nodes == 2
    assert (two.router.host, two.router.token_file) == ("0.0.0.0", "/etc/legato/api-token")
    for role in ("prefill", "decode"):
        [start] = [
            c.flag("resources")
            for name in ({"prefill": "ray-head", "decode": "decode"}[role],)
            for c in unit_commands(DEPLOY / f"systemd/legato-{name}.service")
            if c.flag("resources")
        ]
        assert yaml.safe_load(start) == dict(two.resources[role].custom)  # type: ignore[index]


def test_there_is_a_unit_for_each_part() -> None:
    assert {path.stem for path in UNITS} == {
        "legato",
        "legato-ray-head",
        "legato-cluster",
        "legato-prefill",
        "legato-decode",
    }


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_hardened_and_stop_by_draining(path: Path) -> None:
    unit = read_unit(path)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    assert service["User"] == "legato"
    assert {key: service.get(key) for key in HARDENED} == HARDENED
    commands = {c.place.split()[1]: c for c in unit_commands(path)}
    bound_s = float(service["TimeoutStopSec"])
    if commands["ExecStart"].words[:2] == ("legato", "serve"):
        assert service["KillMode"] == "mixed"  # SIGTERM to the owner, who drains for 10 s
        assert bound_s >= 10 + 30
    elif path.stem in ("legato-prefill", "legato-decode"):
        assert bound_s >= float(commands["ExecStop"].flag("timeout")) + 25
        assert "ExecStop=-" in path.read_text()  # nothing to drain where no service answers
    environment = dict(item.split("=", 1) for item in service["Environment"].split())
    if path.stem != "legato":
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == "%d/ray-token"
        assert "ray-token:/etc/legato/ray-token" in service["LoadCredential"].split()
    if path.stem in ("legato-prefill", "legato-decode"):
        two = load({}, EXAMPLES / "two-machines.yaml").config
        head = commands["ExecStart"].flag("address").partition(":")[0]
        assert environment["LEGATO_ADDRESS"] == f"{head}:{two.router.port}"
        port = commands["ExecStart"].flag("address").partition(":")[2]
        [start] = unit_commands(DEPLOY / "systemd/legato-ray-head.service")
        assert (start.flag("node-ip-address"), start.flag("port")) == (head, port)


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    assert _verified(tmp_path, lambda text: text) == ""
    assert "Unknown key" in _verified(tmp_path, lambda text: text.replace("KillMode", "KilMode"))


def _verified(folder: Path, change: object) -> str:
    """What systemd-analyze says of the units, with a program that is there."""
    assert callable(change)
    paths = []
    for path in UNITS:
        program = re.sub(r"/opt/legato/\.venv/bin/\w+", sys.executable, path.read_text())
        copied = folder / path.name
        copied.write_text(change(program))
        paths.append(str(copied))
    done = subprocess.run(
        ["systemd-analyze", "verify", *paths],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if "legato" in line)


def test_the_image_has_what_it_copies_and_no_more_rights() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    sources = [word for words in copied for word in words.split()]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    kept = (ROOT / ".dockerignore").read_text()
    assert set(re.findall(r"^!(\S+)$", kept, flags=re.MULTILINE)) == set(sources)
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    names = {stage.splitlines()[0].rpartition(" AS ")[2]: stage for stage in stages}
    assert set(names) == {"build", "base", "cuda", "cpu"}
    for name in ("cuda", "cpu"):
        assert re.findall(r"^USER (\S+)$", names[name], flags=re.MULTILINE) == ["1000:1000"]
        assert re.findall(r"^EXPOSE (.+)$", names[name], flags=re.MULTILINE) == ["50051 51051"]
        assert 'ENTRYPOINT ["legato"]' in names[name]
    bases = [stage.split()[0] for stage in stages]
    assert [base for base in bases if base.endswith(":latest")] == []
    assert {base for base in bases if ":" not in base} == {"base"}
    pinned = re.findall(r"^torch(==\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.findall(r"torch(==\S+)", names["cpu"]) == pinned
    for name in ("cuda", "cpu"):
        assert "-c constraints.txt" in names[name]


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin")
    program = program or shutil.which("hadolint")
    assert program, "hadolint is of the development tools"
    assert _linted(program, DOCKERFILE, tmp_path) == ""
    latest = DOCKERFILE.replace("python:3.12-slim AS base", "python:latest AS base")
    assert "DL3007" in _linted(program, latest, tmp_path)


def _linted(program: str, text: str, folder: Path) -> str:
    (folder / "Dockerfile").write_text(text)
    done = subprocess.run(
        [program, "--no-color", str(folder / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout + done.stderr
