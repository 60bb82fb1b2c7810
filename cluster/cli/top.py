"""`legato top`: a service, live in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.connection import AddressOption, PortOption, choose_address
from legato.cluster.cli.status import ask_each
from legato.cluster.cli.top_view import Look, top_view
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence


def top(
    once: Annotated[
        bool, typer.Option("--once", help="One view over one interval, as plain lines, and end.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")
    ] = 1.0,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Watch the pools, live: workers, KV memory, queues, tokens/s.

    Goes on through the restart of a router; Ctrl-C ends it. Where there is no terminal it is as
    with --once.

    Examples:

        legato top

        legato top --interval 0.5 --address 10.0.0.1:50051,10.0.0.1:50052

        legato top --once
    """
    from rich.console import Console

    addresses = choose_address(address, port).split(",")
    before = _look(addresses)
    if before.error:
        raise ServiceError(before.error)
    if once or not sys.stdout.isatty():
        time.sleep(interval)
        now = _look(addresses)
        if now.error:
            raise ServiceError(now.error)
        Console(width=None if sys.stdout.isatty() else 200).print(top_view(now, before))
        return
    try:
        _watch(addresses, before, interval)
    except KeyboardInterrupt:
        return


def _watch(addresses: Sequence[str], before: Look, interval_s: float) -> None:
    from rich.live import Live

    now = before
    with Live(top_view(now, before), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            look = _look(addresses)
            # While no router answers, the last that was seen stays, and its age is told.
            if not look.error:
                before, now = (now if not now.error else before), look
                live.update(top_view(now, before), refresh=True)
            else:
                live.update(top_view(now, before, look), refresh=True)


def _look(addresses: Sequence[str]) -> Look:
    try:
        told = ask_each(list(addresses))
    except ServiceError as error:
        return Look(time.monotonic(), {}, str(error))
    return Look(time.monotonic(), told)
