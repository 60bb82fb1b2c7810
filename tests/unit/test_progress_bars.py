"""Bars for downloads and weights on a terminal, plain lines where there is none."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from legato.cluster.cli.progress import TerminalProgress, bar
from legato.worker.weights import download_progress, hub


def lines_of(console: Console, file: io.StringIO) -> list[str]:
    return [line.partition("] ")[2] for line in file.getvalue().splitlines()]


def plain() -> tuple[TerminalProgress, Console, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=120)
    return TerminalProgress(console), console, file


def test_without_a_terminal_a_download_is_a_line_for_every_quarter() -> None:
    progress, console, file = plain()
    for done in range(0, 2001, 7):
        progress.amount("downloading m", done, 2000)
    progress.amount("downloading m", 2000, 2000)
    lines = lines_of(console, file)
    assert lines == [f"downloading m: {25 * part} % of 2 KB" for part in range(5)]


def test_without_a_terminal_weights_are_told_in_words() -> None:
    progress, console, file = plain()
    for text in ("decode: starting; weights 40 %", "decode: starting; weights 40 %"):
        progress.state(text)
    assert lines_of(console, file) == ["decode: starting; weights 40 %"]


def test_without_a_terminal_weights_are_told_now_and_then() -> None:
    file = io.StringIO()
    moment = iter(range(1000)).__next__  # each look at the clock is a second later
    progress = TerminalProgress(Console(file=file, width=120), now=moment)
    for percent in range(0, 101, 2):
        progress.state(f"decode: 0 of 1 ready; weights {percent} %")
    progress.state("decode: 1 of 1 ready")
    lines = [line.partition("] ")[2] for line in file.getvalue().splitlines()]
    assert lines[0] == "decode: 0 of 1 ready; weights 0 %"
    assert lines[-1] == "decode: 1 of 1 ready"
    assert 3 <= len(lines) <= 9, lines


def test_on_a_terminal_both_are_bars() -> None:
    file = io.StringIO()
    progress = TerminalProgress(Console(file=file, width=120, force_terminal=True))
    progress.state("decode: starting; weights 50 %")
    status = progress._status
    assert status is not None
    assert f"weights {'█' * 10}{'░' * 10}  50 %" in str(status.status)
    progress.amount("downloading m", 3, 4)
    assert f"downloading m {'█' * 15}{'░' * 5}  75 % of 4 B" in str(status.status)
    progress.close()
    assert progress._status is None


def test_a_bar_has_its_length_whatever_it_is_told() -> None:
    for percent in (0, 1, 99, 100, 140):
        assert len(bar(percent).split()[0]) == 20
    assert bar(100).startswith("█" * 20)


def test_the_bar_of_bytes_tells_and_draws_nothing(capsys: Any) -> None:  # noqa: ANN401  # pytest's
    told: list[tuple[int, int]] = []
    kind = download_progress.bar_for(lambda done, total: told.append((done, total)))
    files = kind(total=3, desc="Fetching 3 files", name="x")
    files.update(3)
    with kind(total=0, unit="B", unit_scale=True, desc="bytes", disable=True, mininterval=0) as b:
        b.total = 100
        b.refresh()
        b.update(40)
        b.update(60)
        b.set_description("done")
    assert told[0] == (0, 100)
    assert told[-1] == (100, 100)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")


def test_a_fetch_hands_its_bar_to_the_hub(monkeypatch: Any, tmp_path: Any) -> None:  # noqa: ANN401  # pytest's
    told: list[tuple[int, int]] = []

    def snapshot_download(repo: str, *, tqdm_class: Any, **_: Any) -> str:  # noqa: ANN401  # as the original
        with tqdm_class(total=10, unit="B", mininterval=0) as shown:
            shown.update(10)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "_probe", lambda *_: None)
    hub.fetch("org/name", None, lambda done, total: told.append((done, total)))
    assert told[-1] == (10, 10)
