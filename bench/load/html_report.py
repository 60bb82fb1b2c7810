"""html_report: a run as one page that needs nothing else, for a browser."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from legato.bench.load.svg_chart import Line, SvgChart
from legato.bench.load.words import CLIENT_ROWS, SERVER_ROWS, duration, notes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from legato.bench.load.curves import Curves

_RANKS = ("p50", "p90", "p99", "max", "mean")
_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --line: #dde1e7; --text: #1a1f27;
  --soft: #5a6472; --one: #1f5fbf; --two: #a23b72; --band: #2563c422;
  --good: #1c7a4a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --bg: #12151a; --card: #1a1f27; --line: #2e3641;
  --text: #e6eaf0; --soft: #9aa5b4; --one: #7fb0ff; --two: #d77fae; --band: #5b94ef2e;
  --good: #5cc48d; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 16px 20px; background: var(--bg);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0 0 8px; }
p { margin: 6px 0; overflow-wrap: anywhere; } .soft { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 14px 0; overflow-x: auto; }
.charts { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
.charts section { margin: 0; min-width: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 18px 3px 0; text-align: right; font-weight: 400; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.part th:first-child { padding-left: 16px; color: var(--soft); }
.pairs td { text-align: left; }
thead th { color: var(--soft); border-bottom: 1px solid var(--line); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
svg .band { fill: var(--band); } svg .line { fill: none; stroke-width: 2; }
svg .one { stroke: var(--one); } svg .two { stroke: var(--two); }
pre { overflow-x: auto; font-size: 12px; }
"""


def html_report(figures: Mapping[str, Any], run: Curves, when: str) -> str:
    """The page. `figures`: as `legato bench --json` prints them; `when`: in words. All that comes
    from a server or a command line is text in it, never markup.
    """
    target, verdict = figures["target"], figures["verdict"]
    look = "bad" if verdict["refused_because"] or verdict["met"] is False else "good"
    title = f"{target['model'] or 'A server'} under load"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # It loads nothing, and runs nothing.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(target["where"])}, {escape(target["protocol"])}, prompts as '
        f"{escape(target['prompts'])}; {escape(when)}</p>",
        f'<p class="{look}" role="status"><strong>{escape(verdict["text"])}</strong></p>',
        *(f"<p>{escape(note)}</p>" for note in notes(figures)),
        _section("As clients had it", _latencies(CLIENT_ROWS, figures)),
        f'<div class="charts">{_charts(figures, run)}</div>',
        _section("As the server says", _server(figures["server"])),
        _section("The load", _pairs(figures["load"])),
        "<details><summary>All figures as JSON</summary><pre>",
        escape(json.dumps(figures, indent=1)),
        "</pre></details></body></html>\n",
    ]
    return "".join(parts)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _latencies(rows: Mapping[str, str], figures: Mapping[str, Any]) -> str:
    head = "".join(f'<th scope="col">{rank}</th>' for rank in _RANKS)
    lines = []
    for name, key in rows.items():
        spread = figures.get(key)
        if spread is None:
            continue
        cells = "".join(f"<td>{duration(spread.get(rank))}</td>" for rank in _RANKS)
        part = ' class="part"' if name.startswith(" ") else ""
        lines.append(f'<tr{part}><th scope="row">{escape(name.strip())}</th>{cells}</tr>')
    if not lines:
        return '<p class="soft">nothing</p>'
    return f'<table><thead><tr><th scope="col"></th>{head}</tr></thead>{"".join(lines)}</table>'


def _server(server: Mapping[str, Any]) -> str:
    if server["source"] is None:
        return '<p class="soft">unavailable: this server says nothing of its own times</p>'
    source = f'<p class="soft">from {escape(server["source"])}</p>'
    return _latencies(SERVER_ROWS, server) + source


def _charts(figures: Mapping[str, Any], run: Curves) -> str:
    goodput = figures["goodput"]
    charts = []
    for title, points, target, name in (
        ("Time to first token", run.ttft, goodput["ttft_slo_s"], "target"),
        ("Inter-token latency, in the window", run.itl, goodput["itl_slo_s"], "target of means"),
    ):
        percents = [(x, 100 * y) for x, y in points]
        marks = [] if target is None else [(target, name)]
        chart = SvgChart(title, "seconds", "% that had it", [Line(percents, "one")], marks=marks)
        charts.append(_section(title, chart.svg()))
    for title, points, look in (
        ("Output tokens per second; the window is shaded", run.tokens_per_s, "one"),
        ("Requests under way", run.under_way, "two"),
    ):
        chart = SvgChart(title, "seconds", "", [Line(points, look)], band=run.window)
        charts.append(_section(title, chart.svg()))
    return "".join(charts)


def _pairs(settings: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in settings.items()
    )
    return f'<table class="pairs">{rows}</table>'
