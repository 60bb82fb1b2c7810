"""The tables that `legato bench` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.bench.load.words import CLIENT_ROWS, SERVER_ROWS, duration, notes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

_RANKS = ("p50", "p90", "p99", "max")


def bench_tables(figures: Mapping[str, Any]) -> list[Table | str]:
    """Latencies as clients had them, what the server says of itself, the rest in words, and the
    verdict last.
    """
    server = figures["server"]
    parts: list[Table | str] = [_latencies("as clients had it", CLIENT_ROWS, figures)]
    if server["source"] is None:
        parts.append("as the server says: unavailable, it says nothing of its own times")
    else:
        parts.append(_latencies("as the server says", SERVER_ROWS, server))
        if server["source"] != "each answer":
            parts.append(f"from {server['source']}")
    seed = figures["load"]["seed"]
    parts += [*notes(figures), f"--seed {seed} sends the same requests again"]
    parts.append(figures["verdict"]["text"])
    return parts


def _latencies(title: str, names: Mapping[str, str], figures: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title)
    for rank in _RANKS:
        table.add_column(rank, justify="right")
    for name, key in names.items():
        spread = figures.get(key)
        if spread is not None:
            table.add_row(name, *(duration(spread.get(rank)) for rank in _RANKS))
    return table
