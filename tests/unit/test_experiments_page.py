"""The page of the experiments: nothing that stands in it breaks it, and its pictures are there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from legato.bench.experiments.chart import Axis, BarChart, LineChart, Series, Style
from legato.bench.experiments.finding import Answer, Check, Finding, Outcome, Table, Verdict
from legato.bench.experiments.page import page_of, write_page
from legato.bench.experiments.run import Setting
from legato.bench.experiments.scale import Scale, tick_label
from legato.bench.experiments.svg import HEIGHT, WIDTH, svg_of

if TYPE_CHECKING:
    from pathlib import Path

LINES = LineChart(
    "Rate <of> tokens & more",
    "It rises.",
    Axis("batch", log=True, ticks=(1, 2, 4)),
    Axis("tokens/s"),
    (
        Series("measured", ((1, 10), (2, 19), (4, 30)), spread=((9, 11), (18, 20), (29, 31))),
        Series("limit", ((1, 12), (4, 48)), Style.LIMIT),
        Series("alone", ((2, 15),), Style.DOTS),
    ),
    (4, "full"),
)
BARS = BarChart(
    "Bytes", "Two bars a group.", "bytes", ("own", "full"),
    (("predicted", (10.0, 30.0)), ("measured", (11.0, 29.0))), (20.0, "half"),
)  # fmt: skip


def setting(model: str = "demo", load_before: float = 0.1, limits_ratio: float = 1.1) -> Setting:
    return Setting(
        model, "llama, 2 layers", "bfloat16", "bfloat16", "cpu", "a | machine", 2, load_before, 2.0,
        "20 to 21 GB/s (4 times)", "not measured", limits_ratio, 60.0, "0.1", "2",
    )  # fmt: skip


def finding(number: int, name: str, chart: LineChart | BarChart | None) -> Finding:
    checks = (
        Check("a | b <script>", "2 *times*", Answer.YES),
        Check("c `d`", "[x](y)\nand more", Answer.NO),
    )
    table = Table(("a|b", "c"), (("1|2", "_3_"),))
    return Finding(
        number, name, "It *holds* | always.", Outcome(checks, table, chart, ("Because | so.",)),
        Verdict.IN_PART, "not so: c", 3.2,
    )  # fmt: skip


def cells(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line.strip().strip("|")))


def test_the_page_and_its_pictures_are_written(tmp_path: Path) -> None:
    found = [finding(2, "lines", LINES), finding(6, "bars", BARS), finding(1, "none", None)]
    files = write_page(tmp_path / "page.md", setting(), found)
    assert [file.name for file in files] == ["page.md", "page-lines.svg", "page-bars.svg"]
    page = files[0].read_text()
    links = re.findall(r"(?<!\\)\]\(([^)#]+)\)", page)
    assert links == ["page-lines.svg", "page-bars.svg"]
    assert all((tmp_path / link).is_file() for link in links)
    titles = re.findall(r"^## (.*)$", page, flags=re.MULTILINE)
    assert titles == ["2. Lines", "6. Bars", "1. None"]
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == anchors


def test_nothing_in_the_page_breaks_its_tables_or_is_html() -> None:
    page = page_of(setting("a`b | c\nd"), [finding(1, "none", None)], {})
    assert r"a \| b \<script\>" in page
    assert "<script" not in page.replace(r"\<script", "")
    assert r"\[x\](y) and more" in page
    assert "`a'b \\| c d`" in page
    tables = re.findall(r"(?:^\|.*\n?)+", page, flags=re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({cells(line) for line in table.splitlines()}) == 1, table


def test_a_busy_machine_is_told() -> None:
    assert "was busy" not in page_of(setting(load_before=0.2), [], {})
    assert "**The machine was busy" in page_of(setting(load_before=1.5), [], {})
    assert "own speed changed" not in page_of(setting(), [], {})
    assert "factor of 1.6 during" in page_of(setting(limits_ratio=1.6), [], {})


@pytest.mark.parametrize("chart", [LINES, BARS])
def test_pictures_are_accessible_and_stay_inside(chart: LineChart | BarChart) -> None:
    root = ElementTree.fromstring(svg_of(chart))
    told = {child.tag.rpartition("}")[2]: child for child in root if child.get("id")}
    assert (told["title"].text, told["desc"].text) == (chart.title, chart.description)
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "title desc"
    for element in root.iter():
        for name, most in (("x", WIDTH), ("cx", WIDTH), ("x1", WIDTH), ("x2", WIDTH)):
            assert 0 <= float(element.get(name, 0)) <= most
        for name in ("y", "cy", "y1", "y2"):
            assert 0 <= float(element.get(name, 0)) <= HEIGHT
        assert float(element.get("height", 0)) >= 0
    assert svg_of(chart) == svg_of(chart)


def test_larger_values_are_further_up_and_right() -> None:
    circles = [
        (float(e.get("cx", 0)), float(e.get("cy", 0)))
        for e in ElementTree.fromstring(svg_of(LINES)).iter()
        if e.tag.endswith("circle") and e.get("cy") != "40"
    ]
    rising = circles[:3]
    assert rising == sorted(rising)
    assert [y for _, y in rising] == sorted((y for _, y in rising), reverse=True)


def test_ticks_are_round_and_within() -> None:
    even = Scale.of([0.0, 87.0], 0, 100, log=False)
    assert even.ticks() == [0, 20, 40, 60, 80]
    decades = Scale.of([0.5, 3000.0], 0, 100, log=True)
    assert decades.ticks() == [1, 10, 100, 1000] or decades.ticks()[0] >= decades.low
    narrow = Scale.of([10.0, 14.0], 0, 100, log=True)
    assert len(narrow.ticks()) >= 3
    assert narrow(10.0) < narrow(12.0) < narrow(14.0) <= 100
    assert [tick_label(x) for x in (0.5, 2048, 3e6, 2.5e9)] == ["0.5", "2,048", "3M", "2.5G"]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="without a point"):
        LineChart("t", "d", Axis("x"), Axis("y"), (Series("s", ()),))
    with pytest.raises(ValueError, match="2 values for 1 groups"):
        BarChart("t", "d", "y", ("a",), (("s", (1.0, 2.0)),))
    with pytest.raises(ValueError, match="1 points, but 2 spreads"):
        Series("s", ((1, 1),), spread=((1, 1), (1, 1)))
