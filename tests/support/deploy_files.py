"""DeployFiles: what the files in `deploy/` tell machines to run, as words."""

from __future__ import annotations

import configparser
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
_ENDS = {";", "&&", "||"}


@dataclass(frozen=True)
class Command:
    """One call of `legato` or `ray`; `words` begin with that. `place` is for people."""

    place: str
    words: tuple[str, ...]

    def flag(self, name: str) -> str:
        """The value of `--name=value`; nothing where it is not there."""
        begin = f"--{name}="
        return next((w.removeprefix(begin) for w in self.words if w.startswith(begin)), "")


def split_shell(place: str, text: str) -> list[Command]:
    """The calls in a line for a shell, without variables set and `exec` before them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if word in _ENDS:
            calls.append([])
        else:
            calls[-1].append(word)
    found = []
    for words in calls:
        while words and (words[0] == "exec" or "=" in words[0].partition("/")[0]):
            words.pop(0)
        if words and (name := Path(words[0]).name) in ("legato", "ray"):
            found.append(Command(place, (name, *words[1:])))
    return found


def exec_commands(place: str, words: list[str]) -> list[Command]:
    """Of a container, a hook or a probe: run as it is, or by a shell."""
    if words[:2] in (["/bin/bash", "-c"], ["/bin/sh", "-c"]):
        return split_shell(place, " ".join(words[2:]))
    return split_shell(place, shlex.join(words))


def documents(folder: Path = DEPLOY / "kuberay") -> list[dict[str, Any]]:
    """All that Kubernetes is told."""
    paths = sorted(folder.glob("*.yaml"))
    return [doc for path in paths for doc in yaml.safe_load_all(path.read_text())]


def ray_cluster() -> dict[str, Any]:
    """The RayCluster."""
    [found] = [doc for doc in documents() if doc["kind"] == "RayCluster"]
    return found


def groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, the head's as KubeRay calls it."""
    spec = cluster["spec"]
    return {
        "headgroup": spec["headGroupSpec"],
        **{group["groupName"]: group for group in spec["workerGroupSpecs"]},
    }


def container(group: dict[str, Any]) -> dict[str, Any]:
    """Its only one."""
    [only] = group["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def pod_commands(cluster: dict[str, Any]) -> list[Command]:
    """Of all containers and their hooks and probes."""
    found = []
    for name, group in groups(cluster).items():
        box = container(group)
        found += exec_commands(f"{name} container", [*box["command"], *box["args"]])
        hooks = box.get("lifecycle", {})
        for hook in hooks:
            found += exec_commands(f"{name} {hook}", hooks[hook]["exec"]["command"])
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            if words := box.get(probe, {}).get("exec", {}).get("command"):
                found += exec_commands(f"{name} {probe}", words)
    return found


class _Keys(dict[str, str]):
    """Of a unit: a key may be given several times; all values stay, one a line."""

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401  # configparser's lists
        if isinstance(value, list) and key in self:
            value = [*self[key], *value]
        super().__setitem__(key, value)


def read_unit(path: Path) -> configparser.ConfigParser:
    """A unit of systemd: each value has a line for each time that its key is given."""
    unit = configparser.ConfigParser(
        interpolation=None,
        strict=False,
        dict_type=_Keys,
        comment_prefixes=("#",),
        delimiters=("=",),
    )
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys are case-sensitive
    unit.read(path)
    return unit


def unit_commands(path: Path) -> list[Command]:
    """Of ExecStart, ExecStop and the like."""
    service = read_unit(path)["Service"]
    return [
        command
        for key, value in service.items()
        if key.startswith("Exec")
        for line in value.splitlines()
        for command in split_shell(f"{path.name} {key}", line.lstrip("-@:+!"))
    ]


def ray_up_commands() -> list[Command]:
    """Of ray-cluster.yaml, whose variables Ray sets; `ray stop` included."""
    file = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    keys = ("head_start_ray_commands", "worker_start_ray_commands")
    return [c for key in keys for line in file[key] for c in split_shell(key, line)]
