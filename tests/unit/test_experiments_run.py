"""The experiments on a tiny model: from the model to verdicts and page; and what is refused."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
import typer
from tiny_models import make_llama_folder

from legato.bench.experiments import kv_heads
from legato.bench.experiments import lab as lab_module
from legato.bench.experiments import run as run_module
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Answer, Check, Finding, Outcome, Verdict
from legato.bench.experiments.lab import Lab, LabSettings
from legato.bench.experiments.run import run_experiments
from legato.bench.experiments.time_budget import TimeBudget
from legato.bench.limits import Limits, Rate
from legato.cluster.cli.experiments import experiments
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMITS = Limits(1, Rate(1e9, 1e9), {"float32": Rate(2e9, 1e9), "bfloat16": None, "int8": None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("model") / "tiny", num_key_value_heads=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lab_module, "measure_limits", lambda *_, **__: LIMITS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(folder: Path, numbers: list[int], seconds: float = 5.0) -> list[Finding]:
    lab = Lab(LabSettings(str(folder), "cpu", "float32", 1))
    started: list[int] = []
    _, findings = run_experiments(
        lab,
        numbers,
        seconds,
        "test",
        on_start=lambda experiment: started.append(experiment.number),
        on_end=lambda finding: None,
    )
    assert started == numbers == [finding.number for finding in findings]
    return findings


def test_three_claims_from_the_command_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_heads, "POOL_BYTES", 16 << 20)
    page = tmp_path / "found.md"
    experiments(
        str(folder), "1,6,8", 60.0, page, as_json=True, device="cpu", dtype="float32", threads=1
    )
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert [finding["number"] for finding in told["findings"]] == [1, 6, 8]
    by_number = {finding["number"]: finding for finding in told["findings"]}
    # Counts and bytes are the same on any machine.
    assert by_number[1]["verdict"] == "holds"
    assert [row[1] for row in by_number[1]["table"]["rows"]] == ["1", "2", "17", "64"]
    assert by_number[6]["checks"][0]["answer"] == "yes", by_number[6]["checks"]
    assert by_number[8]["checks"][0]["answer"] == "yes"
    for finding in told["findings"]:
        # The thresholds are said before the figures.
        said = err.partition(f"{finding['number']}. {finding['claim']}")[2]
        said, figures, _ = said.partition(f": {finding['checks'][0]['measured']}")
        assert figures
        assert all(check["statement"] in said for check in finding["checks"])
        assert finding["verdict"] not in said
        assert finding["verdict"] in page.read_text()
    assert (tmp_path / "found-kv-heads.svg").is_file()
    assert told["setting"]["model"] == str(folder)


def test_times_of_a_tiny_model_are_measured_round_by_round(folder: Path) -> None:
    [lengths, recomputed] = run(folder, [4, 2], seconds=6.0)
    for finding in (lengths, recomputed):
        assert finding.outcome.table is not None, finding.reason
        assert finding.outcome.chart is not None
        assert len(finding.outcome.table.rows) >= 3
    counted = recomputed.outcome.checks[0]
    assert counted.measured.startswith("exponents 1.9")


def test_what_a_model_cannot_show_is_said(folder: Path, tmp_path: Path) -> None:
    every_head = make_llama_folder(tmp_path / "mha", num_key_value_heads=4)
    [finding] = run(every_head, [6])
    assert finding.verdict is Verdict.NOT_MEASURED
    assert "a KV head for each of its 4 query heads" in finding.reason
    short = make_llama_folder(tmp_path / "short", max_position_embeddings=64)
    batch, streams = run(short, [5, 9])
    assert "needs 129 tokens, limit 64" in batch.reason
    assert "needs 96 tokens, limit 64" in streams.reason
    [interference] = run(folder, [10])  # with one thread
    assert "1 core is to be used" in interference.reason


class _Broken(Experiment):
    number, name, claim = 1, "broken", "It works."
    criteria = ("it does",)

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        raise ExceptionGroup("tasks", [RuntimeError("UNAVAILABLE: gone"), OSError("no room")])


class _Slow(_Broken):
    seconds: ClassVar[list[float]] = []  # that each was given

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        self.seconds.append(budget.seconds)
        if len(self.seconds) == 1:
            time.sleep(0.6)
        return Outcome((Check(self.criteria[0], "it did", Answer.YES),))


class _Bug(_Broken):
    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        raise AssertionError("a bug")


def test_a_failure_is_told_and_a_bug_is_not_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "EXPERIMENTS", {1: _Broken, 2: _Bug})
    [finding] = run(folder, [1])
    assert finding.verdict is Verdict.NOT_MEASURED
    assert finding.reason == "UNAVAILABLE: gone; no room"
    with pytest.raises(AssertionError, match="a bug"):
        run(folder, [2])


def test_one_that_is_late_takes_nothing_from_those_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "EXPERIMENTS", dict.fromkeys((1, 2, 3), _Slow))
    _Slow.seconds.clear()
    lab = Lab(LabSettings(str(folder), "cpu", "float32", 1))
    run_experiments(lab, [1, 2, 3], 0.6, "test", on_start=lambda _: None, on_end=lambda _: None)
    late, own, more = _Slow.seconds
    assert late == pytest.approx(0.2, abs=0.01)
    assert own == pytest.approx(0.2)  # nothing is left, and it has its share
    assert more == pytest.approx(0.2)
    _Slow.seconds[:] = [0.0]
    run_experiments(lab, [1, 2, 3], 60.0, "test", on_start=lambda _: None, on_end=lambda _: None)
    _, first, second, third = _Slow.seconds
    assert first == pytest.approx(20, abs=1)
    assert second == pytest.approx(30, abs=2)  # what the first has left is shared
    assert third == pytest.approx(60, abs=4)


@pytest.mark.parametrize("only", ["0", "11", "1;2", "", "1,,2", "one", "-1", "²"])
def test_numbers_that_are_none_are_refused(only: str) -> None:
    with pytest.raises(typer.BadParameter, match="from 1 to 10") as refused:
        experiments("demo", only)
    assert repr(only) in refused.value.message


def test_wrong_values_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no such folder"):
        experiments("demo", "1", output=tmp_path / "none" / "page.md")
    with pytest.raises(typer.BadParameter, match=r"may use \d+ cores, got 4096"):
        experiments("demo", "1", threads=4096)
    with pytest.raises(ServiceError, match="no such folder or file"):
        experiments(str(tmp_path / "none"), "1", threads=1)


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_rounds_end_where_another_would_not_fit() -> None:
    clock = _Clock()
    budget = TimeBudget(10.0, clock)
    rounds = []
    for turn in budget.rounds(99):
        rounds.append(turn)
        clock.now_s += 3.0
    assert rounds == [0, 1, 2]  # at 9 s a fourth would end at 12
    assert list(TimeBudget(10.0, clock).rounds(2)) == [0, 1]


def test_a_first_round_may_be_late_but_not_for_ever() -> None:
    clock = _Clock()
    late, over = TimeBudget(10.0, clock), TimeBudget(4.0, clock)
    clock.now_s = 12.0
    assert list(late.rounds(5)) == [0]
    assert list(over.rounds(5)) == []
    assert list(TimeBudget(0.0, clock).rounds(5)) == []


def test_sizes_that_take_too_long_are_left_out() -> None:
    clock = _Clock()

    def run_size(size: int) -> None:
        clock.now_s += size

    assert TimeBudget(60.0, clock).fitting([1, 2, 4, 8, 16], run_size, least=2) == [1, 2, 4, 8]
    assert TimeBudget(6.0, clock).fitting([1, 2, 4, 8, 16], run_size, least=3) == [1, 2, 4]
    assert TimeBudget(3.0, clock).fitting([1, 2, 4, 8, 16], run_size, least=3) == [1, 2]
    assert TimeBudget(0.0, clock).fitting([1, 2], run_size, least=2) == []


def test_time_apart_is_given_back_to_all() -> None:
    clock = _Clock()
    whole = TimeBudget(100.0, clock)
    part = whole.part(0.5)
    with part.apart():
        clock.now_s += 70.0
    assert (part.left_s, whole.left_s) == (50.0, 100.0)


def test_memory_for_workers_is_looked_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_module, "free_bytes", lambda _: 1 << 30)
    lab = Lab(LabSettings(str(folder), "cpu", "float32", 1))
    lab.check_room(1)
    with pytest.raises(CannotMeasureError, match=r"2 workers .* 1,024 MiB of memory are free"):
        lab.check_room(2)
