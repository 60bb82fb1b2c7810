"""`legato bench`: what it prints, draws and refuses."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from fake_generation import FakeGeneration, serving
from fake_openai import FakeOpenAi, openai_at
from rich.console import Console
from router_service import until

from legato.bench.load.curves import curves
from legato.bench.load.html_report import html_report
from legato.bench.load.plot import check_plot, draw
from legato.bench.load.report import Slo, report
from legato.bench.load.sample import Sample
from legato.bench.load.svg_chart import Line, SvgChart, ticks
from legato.bench.load.workload import LoadWorkload, Planned
from legato.cluster.cli.bench_progress import BenchProgress
from legato.cluster.cli.bench_table import bench_tables
from legato.cluster.cli.main import main
from legato.plan.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = ("--input-tokens", "4", "--output-tokens", "3")
EVIL = "<script>alert('x')</script> & [red]"


async def command(
    *words: str, interrupt_when: Callable[[], bool] | None = None
) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "legato.cluster.cli.main", "bench", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    if interrupt_when is not None:
        await until(interrupt_when, 60)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def run() -> list[Sample]:
    """Two streams of 12 s, and their warm-up."""
    made = []
    for stream in range(2):
        for number in range(7):
            due_s = 100.0 + 2 * number
            one = Sample(Planned(number, None, 4, 4), due_s, due_s, stream=stream)
            one.is_warmup = number == 0
            one.counted_by = "token ids"
            for step in range(4):
                one.note(due_s + 0.5 + 0.25 * step, 1)
            one.end(due_s + 1.5, 4)
            made.append(one)
    return made


def figures(samples: list[Sample], **changed: Any) -> dict[str, Any]:  # noqa: ANN401
    target = {"where": "here:1", "model": "m", "protocol": "gRPC", "prompts": "text", "notes": []}
    told = report(samples, Slo(ttft_s=0.6))
    return {"interrupted": False, "target": target, "load": {"seed": 5}, **told, **changed}


def shown(told: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    for part in bench_tables(told):
        console.print(part, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_tables_and_files_over_grpc(tmp_path: Path) -> None:
    html, plot = tmp_path / "r.html", tmp_path / "r.png"
    async with serving(FakeGeneration()) as address:
        load = ("--address", address, *LENGTHS, "--concurrency", "2", "--num-requests", "20")
        code, out, err = await command(
            *load, "--itl-slo", "0.000001", "--min-window", "0.01", "--html", str(html), "--plot",
            str(plot),
        )  # fmt: skip
    assert (code, err) == (4, "")
    assert "time to first token" in out
    assert "as the server says" in out
    assert "requests: 20 ok, 0 failed, 0 unfinished; before them 2 to warm up" in out
    assert "goodput: 0.0 % of the requests" in out
    assert "the targets are missed: 0.0 % of 20 requests were good" in out
    assert re.search(r"--seed \d+ sends the same requests again", out)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "the targets are missed" in html.read_text()


async def test_json_over_http_and_no_verdict_where_the_window_is_too_short() -> None:
    server = FakeOpenAi(takes_ids=False, chunk_s=0.001)
    async with openai_at(server) as url:
        load = ("--url", f"{url}/v1", *LENGTHS, "--rate", "50", "--num-requests", "5", "--json")
        code, out, err = await command(*load, "--arrivals", "gamma:2", "--seed", "7")
    told = json.loads(out)
    assert (code, err, told["ok"], told["interrupted"]) == (3, "", 5, False)
    assert told["target"]["protocol"] == "/v1/completions"
    assert (told["load"]["arrivals"], told["load"]["seed"]) == ("gamma:2", 7)
    assert told["verdict"]["refused_because"][0]["doubt"] == "window too short"
    assert told["server"] == {"source": None}


async def test_failures_leave_no_verdict() -> None:
    async with openai_at(FakeOpenAi(status=503)) as url:
        load = ("--url", url, *LENGTHS, "--concurrency", "1", "--num-requests", "2")
        code, out, _ = await command(*load)
    assert code == 1
    assert "no verdict: 2 of 2 requests failed: see to the errors" in out
    assert "HTTP 503: 2, the first: not now" in out


async def test_an_interrupted_command_prints_what_it_has() -> None:
    service = FakeGeneration(token_s=0.02)
    async with serving(service) as address:
        load = ("--address", address, *LENGTHS, "--rate", "20", "--duration", "100", "--json")
        code, out, err = await command(*load, interrupt_when=lambda: service.num_calls > 20)
    told = json.loads(out)
    assert code == 130
    assert told["interrupted"]
    assert told["ok"] > 0
    assert "what was measured follows" in err


RATE = ("--rate", "1", "--num-requests", "1")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--concurrency", "1", "--num-requests", "1"), "--input-tokens and --output-tokens"),
        ((*LENGTHS, "--concurrency", "1"), "--num-requests or --duration"),
        ((*LENGTHS, "--num-requests", "1"), "a load needs a rate"),
        (("--input-tokens", "x", "--output-tokens", "3", *RATE), "must be 512, 100..900"),
        (("--trace", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read"),
        (("--port", "1", *LENGTHS, *RATE), "no service answers"),
        (("--url", "http://127.0.0.1:1", *LENGTHS, *RATE), "no server answers at http://127."),
        (("--url", "ftp://x", *LENGTHS, *RATE), "must be http://host:port, or several"),
        (("--url", "http://x:1", "--port", "1", *LENGTHS, *RATE), "is given beside --port"),
        (("--model", "m", *LENGTHS, *RATE), "--model: goes with --url"),
        (("--arrivals", "bursts", *LENGTHS, *RATE), "must be poisson, gamma:CV or constant"),
        (("--warmup", "1h", *LENGTHS, *RATE), "--warmup: must be requests, such as 20"),
        (("--percentile", "101", *LENGTHS, *RATE), "101"),
        (("--html", "/nowhere/r.html", *LENGTHS, *RATE), "'/nowhere/r.html' is in no folder"),
        (("--plot", "r.gif", *LENGTHS, *RATE), "must end with .png, .svg, .pdf, got 'r.gif'"),
    ],
)
def test_wrong_use_gets_one_line(
    words: tuple[str, ...],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["legato", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code in (1, 2), out, len(err.splitlines())) == (True, "", 1)
    assert error in err.replace("Invalid value for ", "")


def test_without_matplotlib_a_plot_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r'needs matplotlib: pip install "legato\[bench\]"'):
        check_plot(tmp_path / "r.png")


def test_a_table_says_where_figures_come_from_and_what_to_doubt() -> None:
    told = figures(run())
    text = shown(told)
    assert "in a window of 11.5 s" in text
    assert "of 12 requests p99 is the slowest" in text
    assert "as the server says: unavailable" in text
    assert "a message brings" not in text
    assert "the targets are met" in text
    told["messages"]["tokens_each"] = 2.5
    told["sent_late_s"]["p99"] = 0.5
    told["prompts"] |= {"tokens": {"mean": 9.0}, "cached_share": 0.25}
    told["short_answers"] = 3
    told["server"] = {"source": "/metrics", "queue_s": {"p50": 0.5, "mean": 0.5, "count": 1}}
    text = shown(told)
    for line in (
        "a message brings 2.50 tokens on average (token ids)",
        "1 % were sent 500.0 ms late or more",
        "prompts had 9.0 tokens on average as the server counts, 4.0 were planned",
        "25.0 % of the prompts' tokens were cached",
        "3 answers are shorter than asked",
        "from /metrics",
    ):
        assert line in text


class Page(HTMLParser):
    """All tags, what they load, and the texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{n}={v}" for n, v in attrs if n in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_needs_nothing_else_and_is_in_light_and_dark() -> None:
    text = html_report(figures(run()), curves(run()), "today")
    page = Page(text)
    assert page.loads == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("svg") == 4
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert len(ET.fromstring(svg)) > 5
    assert page.tags.count("rect") == 2  # the window, over time
    assert "the targets are met" in text
    told = json.loads("".join(page.texts[page.texts.index("All figures as JSON") + 1 :]))
    assert told["ok"] == 12


def test_what_comes_from_outside_is_text_in_a_page_and_in_a_table() -> None:
    samples = run()
    failed = Sample(Planned(9, None, 4, 4), 101.0, 101.0, stream=0)
    failed.fail(102.0, EVIL, EVIL)
    told = figures([*samples, failed], load={"seed": EVIL})
    told["target"] |= {"where": EVIL, "model": EVIL, "protocol": EVIL, "notes": [EVIL]}
    told["server"] = {"source": EVIL}
    page = html_report(told, curves(samples), EVIL)
    assert page.count("&lt;script&gt;") > 8
    assert "script" not in Page(page).tags
    assert shown(told).count("[red]") >= 3


def test_a_run_without_answers_has_a_page_too(tmp_path: Path) -> None:
    failed = Sample(Planned(0, None, 4, 4), 5.0, 5.0, stream=0)
    failed.fail(5.1, "UNAVAILABLE", "gone")
    shape = curves([failed])
    assert (shape.ttft, shape.itl, shape.window) == ((), (), None)
    assert "UNAVAILABLE: 1" in html_report(figures([failed]), shape, "today")
    draw(tmp_path / "r.svg", "$x", shape)
    assert "$x" in (tmp_path / "r.svg").read_text()


def test_curves_are_those_of_the_samples() -> None:
    shape = curves(run())
    assert shape.window == (2.0, 13.5)
    assert shape.ttft == ((0.5, 1 / 12), *(((0.5, n / 12)) for n in range(2, 13)))
    assert {x for x, _ in shape.itl} == {0.25}
    bins = [b[0] - a[0] for a, b in zip(shape.tokens_per_s, shape.tokens_per_s[1:], strict=False)]
    tokens = sum(rate * bins[0] for _, rate in shape.tokens_per_s)
    assert tokens == pytest.approx(7 * 2 * 4)
    # Two streams that are busy for 1.5 s of each 2 s.
    busy = [count * bins[0] for _, count in shape.under_way]
    assert sum(busy) == pytest.approx(2 * 7 * 1.5)
    assert max(count for _, count in shape.under_way) == pytest.approx(2)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6]), (0.012, [0, 0.005, 0.01])],
)
def test_ticks_are_round(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)


def test_a_chart_marks_what_is_in_its_range_alone() -> None:
    line = [Line([(0.0, 1.0), (2.0, 3.0)], "one")]
    svg = SvgChart("<t>", "x", "y", line, band=(0.5, 1.0), marks=[(1.0, "a<"), (9.0, "b")]).svg()
    tree = ET.fromstring(svg)
    assert tree.get("aria-label") == "<t>"
    texts = [e.text for e in tree.iter("text")]
    assert "a<" in texts
    assert "b" not in texts


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({"num_requests": 2}, 2),
        ({"duration_s": 40.0}, 40.0),
        ({"duration_s": 40.0, "num_requests": 9}, 9),
    ],
)
def test_progress_tells_what_is_under_way(settings: dict[str, Any], total: float) -> None:
    four = Lengths.parse("4")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    one, other = run()[:2]
    with BenchProgress(LoadWorkload(four, four, rate_per_s=1.0, **settings), console) as progress:
        task = progress._progress.tasks[0]
        assert task.total == total
        for sample in (one, other):
            ended_s, sample.ended_s = sample.ended_s, None
            progress.take(sample)
            sample.ended_s = ended_s
        progress.take(other)
        assert task.description == "measured: 1 under way, 1 ended"
        one.code = "UNAVAILABLE"
        progress.take(one)
        assert task.description == "warm-up: 0 under way, 2 ended, 1 failed"
