"""svg_of: a chart as an SVG file with a title and a description; the same chart, the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from legato.bench.experiments.chart import BarChart, LineChart, Series, Style
from legato.bench.experiments.scale import Scale, tick_label

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 20, 62, 56
# Told apart by those who do not see red and green; dashes and dots tell them apart in print.
_COLORS = ("#0b5fa5", "#d9622b", "#2f8f5b", "#7a4fa3", "#8a6d1d")
_INK, _GREY, _GRID = "#1d2733", "#5b6673", "#dde2e8"


def svg_of(chart: LineChart | BarChart) -> str:
    """The whole file."""
    body = _lines(chart) if isinstance(chart, LineChart) else _bars(chart)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-labelledby="title desc" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    told = [
        f'<title id="title">{escape(chart.title)}</title>',
        f'<desc id="desc">{escape(chart.description)}</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(WIDTH / 2, 20, chart.title, size=14, weight=600),
    ]
    return "\n".join([head, *told, *body, "</svg>"]) + "\n"


def _lines(chart: LineChart) -> list[str]:
    points = [point for series in chart.series for point in series.points]
    ends = [value for series in chart.series for pair in series.spread for value in pair]
    marked = [chart.mark[0]] if chart.mark else []
    x = Scale.of([p[0] for p in points] + marked, _LEFT, WIDTH - _RIGHT, log=chart.x.log)
    y = Scale.of([p[1] for p in points] + ends, HEIGHT - _BOTTOM, _TOP, log=chart.y.log)
    parts = _frame(y, chart.y.label, chart.y.ticks)
    for value in chart.x.ticks or x.ticks():
        parts.append(_line(x(value), HEIGHT - _BOTTOM, x(value), HEIGHT - _BOTTOM + 5, _INK))
        parts.append(_text(x(value), HEIGHT - _BOTTOM + 19, tick_label(value)))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 14, chart.x.label))
    if chart.mark is not None:
        place = x(chart.mark[0])
        parts.append(_line(place, _TOP, place, HEIGHT - _BOTTOM, _GREY, dashes="2 3"))
        anchor = "end" if place > WIDTH / 2 else "start"
        shift = -5 if anchor == "end" else 5
        parts.append(_text(place + shift, HEIGHT - _BOTTOM - 8, chart.mark[1], anchor, _GREY))
    for index, series in enumerate(chart.series):
        parts += _series(series, _COLORS[index % len(_COLORS)], x, y)
    return parts + _legend([(s.name, s.style) for s in chart.series])


def _series(series: Series, color: str, x: Scale, y: Scale) -> list[str]:
    places = [(x(a), y(b)) for a, b in series.points]
    parts = []
    if series.style is not Style.DOTS and len(places) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        dashes = ' stroke-dasharray="6 4"' if series.style is Style.LIMIT else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
        )
    for (place, _), (low, high) in zip(places, series.spread, strict=False):
        parts.append(_line(place, y(low), place, y(high), color, width=1.5))
        parts += [
            _line(place - 4, y(end), place + 4, y(end), color, width=1.5) for end in (low, high)
        ]
    if series.style is not Style.LIMIT:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in places]
    return parts


def _bars(chart: BarChart) -> list[str]:
    values = [value for _, series in chart.series for value in series]
    lined = [chart.line[0]] if chart.line else []
    y = Scale.of([0.0, *values, *lined], HEIGHT - _BOTTOM, _TOP, log=False)
    parts = _frame(y, chart.y_label)
    room = (WIDTH - _LEFT - _RIGHT) / len(chart.groups)
    width = min(60.0, 0.8 * room / len(chart.series))
    for number, group in enumerate(chart.groups):
        middle = _LEFT + room * (number + 0.5)
        parts.append(_text(middle, HEIGHT - _BOTTOM + 19, group))
        for index, (_, series) in enumerate(chart.series):
            left = middle + width * (index - len(chart.series) / 2)
            top = y(series[number])
            color = _COLORS[index % len(_COLORS)]
            parts.append(
                f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{HEIGHT - _BOTTOM - top:.1f}" fill="{color}"/>'
            )
            parts.append(_text(left + width / 2, top - 4, tick_label(series[number]), size=11))
    if chart.line is not None:
        place = y(chart.line[0])
        parts.append(_line(_LEFT, place, WIDTH - _RIGHT, place, _GREY, dashes="6 4"))
        parts.append(_text(WIDTH - _RIGHT, place - 5, chart.line[1], "end", _GREY))
    return parts + _legend([(name, Style.MEASURED) for name, _ in chart.series])


def _frame(y: Scale, label: str, ticks: Sequence[float] = ()) -> list[str]:
    parts = []
    for value in ticks or y.ticks():
        parts.append(_line(_LEFT, y(value), WIDTH - _RIGHT, y(value), _GRID))
        parts.append(_text(_LEFT - 8, y(value) + 4, tick_label(value), "end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle:.1f}" text-anchor="middle" fill="{_INK}" '
        f'transform="rotate(-90 16 {middle:.1f})">{escape(label)}</text>'
    )
    parts.append(_line(_LEFT, _TOP, _LEFT, HEIGHT - _BOTTOM, _INK))
    parts.append(_line(_LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT, HEIGHT - _BOTTOM, _INK))
    return parts


def _legend(names: Sequence[tuple[str, Style]]) -> list[str]:
    parts, place = [], float(_LEFT)
    for index, (name, style) in enumerate(names):
        color = _COLORS[index % len(_COLORS)]
        dashes = "6 4" if style is Style.LIMIT else ""
        if style is Style.DOTS:
            parts.append(f'<circle cx="{place + 11:.1f}" cy="40" r="3.5" fill="{color}"/>')
        else:
            parts.append(_line(place, 40, place + 22, 40, color, dashes=dashes, width=3))
        parts.append(_text(place + 28, 44, name, "start"))
        place += 48 + 6.6 * len(name)
    return parts


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, *, dashes: str = "", width: float = 1
) -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width:g}"{dash}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    color: str = _INK,
    *,
    size: int = 12,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{color}">{escape(text)}</text>'
    )
