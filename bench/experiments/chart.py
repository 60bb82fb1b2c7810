"""LineChart, BarChart: what a picture shows, apart from how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """How a series is drawn."""

    MEASURED = "measured"  # a line with a dot at each point
    LIMIT = "limit"  # dashed: arithmetic, or what the machine can do at most
    DOTS = "dots"  # no line


@dataclass(frozen=True)
class Series:
    """Points from left to right; `spread` has the lower and upper quartile of each, or nothing."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: Style = Style.MEASURED
    spread: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.spread and len(self.spread) != len(self.points):
            raise ValueError(f"{len(self.points)} points, but {len(self.spread)} spreads")


@dataclass(frozen=True)
class Axis:
    """`ticks`: where labels stand; () is wherever they are round."""

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class LineChart:
    """`title` and `description` are for who cannot see it."""

    title: str
    description: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    mark: tuple[float, str] | None = None  # a vertical line, and what it says

    def __post_init__(self) -> None:
        if not any(series.points for series in self.series):
            raise ValueError("a chart without a point")


@dataclass(frozen=True)
class BarChart:
    """A group of bars for each name, one of each series."""

    title: str
    description: str
    y_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]
    line: tuple[float, str] | None = None  # a horizontal line, and what it says

    def __post_init__(self) -> None:
        for name, values in self.series:
            if len(values) != len(self.groups):
                raise ValueError(f"{name} has {len(values)} values for {len(self.groups)} groups")
