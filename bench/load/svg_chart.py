"""SvgChart: lines over two axes as SVG that stands in a page, in the page's colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 20, 36
_NUM_TICKS = 5


@dataclass(frozen=True)
class Line:
    """`look`: the class by which the page's style colours it."""

    points: Sequence[tuple[float, float]]
    look: str


@dataclass(frozen=True)
class SvgChart:
    """`band`: a stretch of x that is marked; `marks`: values of x with a name each."""

    title: str  # for those who do not see it
    x_label: str
    y_label: str
    lines: Sequence[Line]
    band: tuple[float, float] | None = None
    marks: Sequence[tuple[float, str]] = ()

    def svg(self) -> str:
        """The element."""
        points = [point for line in self.lines for point in line.points]
        most_x = max([1e-9, *(x for x, _ in points)])
        most_y = max([1e-9, *(y for _, y in points)])
        x_ticks, y_ticks = ticks(most_x), ticks(most_y)
        end_x, end_y = max(most_x, x_ticks[-1]), max(most_y, y_ticks[-1])

        def place(x: float, y: float) -> tuple[float, float]:
            return (
                round(_LEFT + min(x, end_x) / end_x * (WIDTH - _LEFT - _RIGHT), 1),
                round(HEIGHT - _BOTTOM - y / end_y * (HEIGHT - _TOP - _BOTTOM), 1),
            )

        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
        ]
        if self.band is not None:
            (begin, top), (end, bottom) = place(self.band[0], end_y), place(self.band[1], 0)
            parts.append(
                f'<rect class="band" x="{begin}" y="{top}" width="{max(0.0, end - begin):.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
        for value in y_ticks:
            left, y = place(0, value)
            parts.append(
                f'<path class="grid" d="M{left} {y}H{WIDTH - _RIGHT}"/>'
                f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
            )
        for value in x_ticks:
            x, bottom = place(value, 0)
            parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>')
        for value, name in self.marks:
            if value <= end_x:
                x, top = place(value, end_y)
                parts.append(
                    f'<path class="mark" d="M{x} {top}V{HEIGHT - _BOTTOM}"/>'
                    f'<text x="{x + 4}" y="{HEIGHT - _BOTTOM - 6}">{escape(name)}</text>'
                )
        for line in self.lines:
            if line.points:
                way = "L".join(f"{x} {y}" for x, y in (place(*point) for point in line.points))
                parts.append(f'<path class="line {escape(line.look)}" d="M{way}"/>')
        parts.append(
            f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">'
            f"{escape(self.x_label)}</text>"
            f'<text x="{_LEFT}" y="{_TOP - 8}">{escape(self.y_label)}</text></svg>'
        )
        return "".join(parts)


def ticks(most: float) -> list[float]:
    """Round values from 0 on, the last one at most `most`, which is above 0."""
    step = 10 ** math.floor(math.log10(most / _NUM_TICKS))
    for factor in (1, 2, 5, 10):
        if most / (step * factor) <= _NUM_TICKS:
            step *= factor
            break
    return [round(step * n, 12) for n in range(int(most / step + 1e-9) + 1)]
