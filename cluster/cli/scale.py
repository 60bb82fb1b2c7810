"""`legato scale`: how many workers each pool is to have."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import AddressOption, PortOption, choose_address, connect_client
from legato.cluster.cli.status_table import role_name
from legato.cluster.errors import ServiceError, WrongInputError
from legato.cluster.pool import MAX_POOL_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from legato.cluster.control_plane import Role

POLL_S = 0.2


def scale(
    targets: Annotated[
        list[str], typer.Argument(help="prefill=N, decode=N, colocated=N: one or more.")
    ],
    wait: Annotated[
        float | None,
        typer.Option(min=0.1, help="Wait up to so many seconds until the pools are there."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also where nothing is served then: a prefill or decode pool of 0."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object: the targets, and whether all are there."),
    ] = False,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Set how many workers a pool has.

    Pools that are not named stay as they are. The running streams of workers that go move to
    others, or end, first. What would leave no worker to serve is refused without --force.

    Examples:

        legato scale prefill=2

        legato scale prefill=2 decode=3 --wait 120
    """
    wanted = parse_targets(targets)
    with _named_as_here(wanted), connect_client(choose_address(address, port)) as client:
        if not force:
            before = {role_name(pool.role): pool.target for pool in client.status().pools}
            then = before | {str(role): size for role, size in wanted.items()}
            if (missing := _missing(then)) and not _missing(before):
                raise ServiceError(
                    f"{missing}; to stop all requests so, say --force (`legato stop` ends the "
                    "service)"
                )
        sizes = client.scale(wanted)
        if not as_json:
            print("target: " + ", ".join(f"{role} {size}" for role, size in sizes.items()))
        if missing := _missing(sizes):
            print(missing, file=sys.stderr)
        deadline_s = time.monotonic() + (wait or 0)
        while wait is not None:
            pools = client.status().pools
            late = [f"{role_name(pool.role)}: {pool.message}" for pool in pools if pool.message]
            if not late:
                break
            if time.monotonic() > deadline_s:
                raise ServiceError(f"not there within {wait:g} s: {'; '.join(late)}")
            time.sleep(POLL_S)
        if as_json:
            pools = client.status().pools
            told = {
                "targets": sizes,
                "ready": {role_name(pool.role): pool.ready for pool in pools},
                "messages": [pool.message for pool in pools if pool.message],
            }
            print(json.dumps(told, ensure_ascii=False))


@contextmanager
def _named_as_here(wanted: Mapping[Role, int]) -> Iterator[None]:
    """The service counts the targets; who wrote them named pools."""
    roles = list(wanted)
    try:
        yield
    except WrongInputError as error:
        text = re.sub(r"\btargets\[(\d+)\]\.target\b", lambda m: roles[int(m[1])], str(error))
        raise WrongInputError(text) from error


def _missing(sizes: Mapping[str, int]) -> str:
    """Why pools of these sizes serve nothing; empty where they do."""
    from legato.cluster.roles import PAIR

    empty = [role for role in PAIR if not sizes.get(role)]
    if not empty or sizes.get("colocated"):
        return ""
    return f"nothing is served with no {' and no '.join(empty)} worker"


def parse_targets(words: list[str]) -> dict[Role, int]:
    """Raises BadParameter naming the word that is wrong."""
    from legato.cluster.roles import ROLES

    roles: dict[str, Role] = {role: role for role in ROLES}
    targets: dict[Role, int] = {}
    for word in words:
        pool, _, size = word.partition("=")
        if pool not in roles or re.fullmatch(r"\d{1,18}", size, re.ASCII) is None:
            names = " or ".join(f"{role}=N" for role in roles)
            raise typer.BadParameter(f"must be {names} with N >= 0, got {word!r}")
        role = roles[pool]
        if role in targets:
            raise typer.BadParameter(f"{role} is given twice")
        if int(size) > MAX_POOL_SIZE:
            raise typer.BadParameter(f"{role} must be in [0, {MAX_POOL_SIZE}], got {size}")
        targets[role] = int(size)
    return targets
