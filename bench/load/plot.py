"""plot: the curves of a run as a picture. The only user of matplotlib here."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from legato.bench.load.curves import Curves, Points

SUFFIXES = (".png", ".svg", ".pdf")
INSTALL_COMMAND = 'pip install "legato[bench]"'
_BLUE, _ORANGE = "#2563a8", "#d9782d"


def check_plot(path: Path) -> None:
    """Before anything is measured.

    Raises:
        ValueError: the file's name says no kind of picture, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"must end with {', '.join(SUFFIXES)}, got {str(path)!r}")
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # it stands in sys.modules without a spec
        found = False
    if not found:
        raise ValueError(f"needs matplotlib: {INSTALL_COMMAND}; --html has pictures without it")


def draw(path: Path, title: str, run: Curves) -> None:
    """Writes the file.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10.4, 6.4), layout="constrained")
        figure.suptitle(title, parse_math=False)  # a model may be named $x$
        (ttft, itl), (rate, under_way) = figure.subplots(2, 2)
        _distribution(ttft, "time to first token, s", run.ttft)
        _distribution(itl, "inter-token latency, s", run.itl)
        _over_time(rate, "output tokens/s", run.tokens_per_s, run.window)
        _over_time(under_way, "requests under way", run.under_way, run.window)
        figure.savefig(path, dpi=150)


def _distribution(axes: Axes, label: str, points: Points) -> None:
    axes.plot([x for x, _ in points], [100 * y for _, y in points], color=_BLUE)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.set_xlabel(label)
    axes.set_ylabel("% that had it")
    axes.grid(visible=True, alpha=0.3)


def _over_time(axes: Axes, label: str, points: Points, window: tuple[float, float] | None) -> None:
    if window is not None:
        axes.axvspan(*window, color=_ORANGE, alpha=0.15, label="the window")
        axes.legend(loc="lower right", frameon=False)
    axes.step([x for x, _ in points], [y for _, y in points], color=_BLUE)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
