"""The tables that `legato bench` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

_RANKS = ("p50", "p90", "p99", "max")
_CLIENT = {
    "time to first token": "ttft_s",
    "inter-token latency": "itl_s",
    "whole answer": "e2e_s",
}
_SERVER = {
    "queue": "queue_s",
    "prefill": "prefill_s",
    "  the model alone": "prefill_model_s",
    "hand-off": "handoff_s",
    "decode": "decode_s",
    "  its model alone": "decode_model_s",
    "delivery": "delivery_s",
}
_LATE_S = 0.01  # a client that is so late is busy itself


def bench_tables(figures: Mapping[str, Any]) -> list[Table | str]:
    """Latencies as clients had them, what the service says of itself, rates and errors."""
    parts: list[Table | str] = [_latencies("as clients had it", _CLIENT, figures)]
    if figures["ok"]:
        parts.append(_latencies("as the service says", _SERVER, figures["server"]))
    parts += [line for line in _lines(figures) if line]
    return parts


def _latencies(title: str, names: Mapping[str, str], figures: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(title)
    for rank in _RANKS:
        table.add_column(rank, justify="right")
    for name, key in names.items():
        spread = figures[key]
        if spread is not None:
            table.add_row(name, *(_ms(spread[rank]) for rank in _RANKS))
    return table


def _lines(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"requests: {figures['ok']} ok, {figures['failed']} failed, "
        f"{figures['unfinished']} unfinished"
    ]
    if figures["window_s"] is not None:
        lines.append(
            f"in a window of {figures['window_s']:.1f} s: "
            f"{figures['output_tokens_per_s']:.1f} tokens/s out, "
            f"{figures['input_tokens_per_s']:.1f} tokens/s in, "
            f"{figures['requests_per_s']:.2f} requests/s"
        )
    goodput = figures["goodput"]
    if (goodput["ttft_slo_s"], goodput["itl_slo_s"]) != (None, None):
        share = goodput["share"]
        lines.append(f"goodput: {'none ended' if share is None else f'{100 * share:.1f} %'}")
    late = figures["sent_late_s"]
    if late is not None and late["p99"] > _LATE_S:
        lines.append(
            f"1 % were sent {_ms(late['p99'])} late or more: this client is busy, and its "
            "lateness is in the latencies"
        )
    lines += [
        f"{code}: {error['count']}, the first: {error['first']}"
        for code, error in figures["errors"].items()
    ]
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
