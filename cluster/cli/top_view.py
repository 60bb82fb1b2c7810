"""top_view: what `legato top` shows of two looks at a service. Pure: no clock, no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.cli.status_table import (
    kv_blocks,
    phase_name,
    short_id,
    status_lines,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from legato.protos import cluster_pb2, common_pb2

BAR_CELLS = 20
# Of the bar, from left to right. Told apart without colours, too.
HELD, CACHED, FREE = ("█", "red"), ("▒", "yellow"), ("·", "dim")
_STATE_STYLES = {"ready": "green", "draining": "yellow", "starting": "cyan", "dead": "red"}


@dataclass(frozen=True)
class Look:
    """What the routers said, by address (None: no answer), or why none did."""

    at_s: float
    told: Mapping[str, cluster_pb2.GetStatusResponse | None]
    error: str = ""

    @property
    def answer(self) -> cluster_pb2.GetStatusResponse | None:
        """Of the first that answered."""
        return next((answer for answer in self.told.values() if answer is not None), None)


def top_view(now: Look, before: Look, lost: Look | None = None) -> RenderableType:
    """`before` is for the rates; `lost` a later look to which no router answered."""
    from rich.console import Group
    from rich.text import Text

    answer = now.answer
    assert answer is not None, "a look without an answer is not shown"
    lines = [Text(line) for line in status_lines(answer, _routers(now))]
    if lost is not None:
        age_s = lost.at_s - now.at_s
        lines.insert(0, Text(f"as {age_s:.0f} s ago: {lost.error}", style="bold red"))
    bar = Text.assemble(
        "KV: ", HELD, " held  ", CACHED, " cached  ", FREE, " free", style="default"
    )
    return Group(*lines, Text(""), _workers(answer, now, before), Text(""), bar)


def rates(now: Look, before: Look) -> dict[str, float]:
    """Tokens/s of each worker between the looks; one that is new has none."""
    earlier, later = before.answer, now.answer
    seconds = now.at_s - before.at_s
    if earlier is None or later is None or seconds <= 0:
        return {}
    then = {w.worker_id: _tokens(w.load) for pool in earlier.pools for w in pool.workers}
    return {
        w.worker_id: max(0, _tokens(w.load) - then[w.worker_id]) / seconds
        for pool in later.pools
        for w in pool.workers
        if w.worker_id in then
    }


def kv_bar(load: common_pb2.WorkerLoad) -> Text:
    """Held, cached and free; what is there at all has a cell, as far as there are cells."""
    from rich.text import Text

    blocks = kv_blocks(load)
    total = blocks["total"]
    if not total:
        return Text("-")
    held, cached = (
        min(BAR_CELLS, max(1, round(BAR_CELLS * count / total))) if count else 0
        for count in (blocks["held"], blocks["cached"])
    )
    cached = min(cached, BAR_CELLS - held)
    free = BAR_CELLS - held - cached
    parts = [
        (mark * cells, style)
        for (mark, style), cells in zip((HELD, CACHED, FREE), (held, cached, free), strict=True)
    ]
    return Text.assemble(*parts, f" {100 * blocks['held'] / total:3.0f} %")


def _workers(answer: cluster_pb2.GetStatusResponse, now: Look, before: Look) -> Table:
    from rich.text import Text

    # As wide as 80 columns allow; a worker's id begins with its role.
    table = table_of(("worker", "state", "KV"), ("running", "waiting", "tokens/s"))
    speed = rates(now, before)
    for pool in answer.pools:
        for worker in pool.workers:
            load, state = worker.load, phase_name(worker.phase)
            table.add_row(
                short_id(worker.worker_id),
                Text(state, style=_STATE_STYLES.get(state, "")),
                kv_bar(load),
                f"{load.running:,}",
                f"{load.waiting:,}",
                f"{speed[worker.worker_id]:,.1f}" if worker.worker_id in speed else "-",
            )
    return table


def _routers(look: Look) -> dict[str, cluster_pb2.RouterStatus | None]:
    return {address: told and told.router for address, told in look.told.items()}


def _tokens(load: common_pb2.WorkerLoad) -> int:
    return load.prefill_tokens + load.decode_tokens
