"""Plot: the curve and the overload as one SVG picture. The only user of matplotlib."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf
    from pathlib import Path

    from matplotlib.axes import Axes

    from legato.bench.decode_curve.batch_sizes import Bend, Point
    from legato.bench.decode_curve.overload import OverloadRow

INSTALL_COMMAND = 'pip install -c constraints.txt "legato[bench]"'
_BLUE, _ORANGE, _GREY, _GREEN = "#2563a8", "#d9782d", "#777777", "#3b8f5a"


def check_matplotlib() -> None:
    """Before anything is measured.

    Raises:
        ValueError: it is not installed; with the command that installs it.
    """
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # it stands in sys.modules without a spec
        found = False
    if not found:
        raise ValueError(
            f"the plot needs matplotlib: {INSTALL_COMMAND}; or leave it out with --no-plot"
        )


def draw(path: Path, bend: Bend, points: SequenceOf[Point], rows: SequenceOf[OverloadRow]) -> None:
    """Writes the file; the same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "legato", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10.4, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(6, 5))
        _draw_curve(left, bend, points)
        _draw_occupancy(right, rows)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text(_described(drawn.getvalue(), bend, points, rows))


def _described(
    svg: str, bend: Bend, points: SequenceOf[Point], rows: SequenceOf[OverloadRow]
) -> str:
    """With what the picture shows in words, for who does not see it."""
    first, best = points[0], max(points, key=lambda point: point.tokens_per_s)
    held = ", ".join(
        f"{100 * row.blocks_held:.0f} % for {row.admission}"
        + ("" if row.risk is None else f" at risk {row.risk:g}")
        for row in rows
    )
    words = (
        f"Decode tokens per second rise from {first.tokens_per_s:.0f} to {best.tokens_per_s:.0f} "
        f"as the requests offered go from {first.offered} to {best.offered}; from "
        f"{bend.batch_size} on the pool of KV blocks is full. Mean share of the blocks held under "
        f"overload: {held}."
    )
    head, end, rest = svg.replace("<svg ", '<svg role="img" ', 1).partition("<metadata>")
    assert end, "matplotlib writes it first"
    title = "<title>Decode rate by batch size, and KV memory under overload</title>"
    return f"{head}{title}\n <desc>{escape(words)}</desc>\n {end}{rest}"


def _draw_curve(axes: Axes, bend: Bend, points: SequenceOf[Point]) -> None:
    offered = [point.offered for point in points]
    rates = [point.tokens_per_s for point in points]
    below = [point.tokens_per_s - point.tokens_per_s_lowest for point in points]
    above = [point.tokens_per_s_highest - point.tokens_per_s for point in points]
    axes.axvline(bend.batch_size, color=_GREY, linewidth=1, linestyle=":")
    axes.annotate(
        f"pool full: {bend.pool_blocks} // {bend.sequence_blocks} = {bend.batch_size}",
        (bend.batch_size, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        color=_GREY,
    )
    axes.plot(
        offered,
        [point.bandwidth_tokens_per_s for point in points],
        color=_ORANGE,
        linestyle="--",
        label="bandwidth limit",
    )
    products = [p.product_tokens_per_s for p in points if p.product_tokens_per_s is not None]
    if len(products) == len(points):
        axes.plot(offered, products, color=_GREEN, linestyle="--", label="product limit")
    axes.errorbar(
        offered, rates, yerr=(below, above), color=_BLUE, marker="o", capsize=3, label="measured"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(offered, [str(size) for size in offered])
    axes.minorticks_off()
    highest = max(point.tokens_per_s_highest for point in points)
    axes.set_ylim(0, min(3 * highest, 1.1 * max(highest, *products)) if products else 2 * highest)
    axes.set_xlabel("requests offered at once")
    axes.set_ylabel("decode tokens/s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=3)


def _draw_occupancy(axes: Axes, rows: SequenceOf[OverloadRow]) -> None:
    names = [
        f"{row.admission}\n{'no risk' if row.risk is None else f'risk {row.risk:g}'}\n"
        f"{row.preemptions} preempted"
        for row in rows
    ]
    places = range(len(rows))
    for offset, values, color, label in (
        (-0.2, [100 * row.blocks_held for row in rows], _BLUE, "blocks held"),
        (0.2, [100 * row.rows_in_use for row in rows], _GREEN, "rows in use"),
    ):
        bars = axes.bar([p + offset for p in places], values, width=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=1)
    axes.axhline(90, color=_GREY, linewidth=1, linestyle=":")
    axes.set_xticks(places, names, fontsize=8)
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("mean KV occupancy under overload, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=2)
