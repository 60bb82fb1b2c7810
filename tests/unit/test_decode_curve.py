from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracle import greedy
from tiny_models import VOCAB_SIZE, make_llama, make_llama_folder

from legato.bench.decode_curve import batch_sizes as batch_sizes_module
from legato.bench.decode_curve.__main__ import main
from legato.bench.decode_curve.batch_sizes import BatchSizes, Bend, Point, Turn, batch_sizes
from legato.bench.decode_curve.capacity_engine import CapacityEngine
from legato.bench.decode_curve.capacity_run import RunRecord, StepRecord
from legato.bench.decode_curve.overload import (
    AnswersDifferError,
    Overload,
    OverloadRow,
    check_same,
)
from legato.bench.decode_curve.plot import draw
from legato.bench.decode_curve.trace import Request, alike, chats
from legato.bench.limits import Limits, Rate
from legato.cluster.text.model_text import ModelText
from legato.worker.config import WorkerConfig
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # of make_llama: 3 layers, K and V, 2 heads of 16, fp32
LIMITS = Limits(1, Rate(1e9, 1e9), {"float32": Rate(2e9, 1e9), "bfloat16": None})
RESERVE = AdmissionRule(AdmissionMode.RESERVE)
RISKY = AdmissionRule(AdmissionMode.EXPECTED, 0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_llama_folder(path, max_position_embeddings=4096)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes_module, "measure_limits", lambda *_, **__: LIMITS)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def engine(folder: Path, num_blocks: int, num_slots: int | None = None) -> CapacityEngine:
    return CapacityEngine(
        WorkerConfig(
            model=str(folder),
            role="decode",
            device="cpu",
            dtype="float32",
            kv_memory_bytes=num_blocks * BLOCK_BYTES,
            prefill_chunk_tokens=100,
        ),
        num_slots,
    )


def crowd(num_requests: int = 60, max_tokens: int = 96) -> list[Request]:
    """Answers that end by themselves, at a tenth of max_tokens or so."""
    draw = random.Random(3)
    params = replace(SamplingParams.greedy_for(max_tokens), temperature=1.0)
    return [
        Request(
            number,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 60))],
            replace(params, seed=number),
            frozenset(range(0, VOCAB_SIZE, 16)),
        )
        for number in range(num_requests)
    ]


# The curve.


def test_the_bend_is_what_the_pool_holds_over_what_a_sequence_takes() -> None:
    bend = Bend.of(num_blocks=182, block_size=16, sequence_tokens=128)
    assert (bend.pool_tokens, bend.sequence_blocks, bend.batch_size) == (2912, 8, 22)
    assert Bend.of(182, 16, 129).batch_size == 182 // 9
    assert batch_sizes(bend) == [1, 2, 4, 8, 16, 22, 33, 44]
    assert batch_sizes(Bend.of(8, 16, 16)) == [1, 2, 4, 8, 12, 16]
    assert batch_sizes(Bend.of(9, 16, 16)) == [1, 2, 4, 9, 14, 18]


def test_the_batch_grows_with_what_is_offered_until_the_pool_is_full(folder: Path) -> None:
    sizes = BatchSizes(prompt_tokens=20, max_tokens=29, num_rounds=2, num_steps=40)
    # 48 rows at the end are 3 blocks; the 17th block is of use to nobody.
    tiny = engine(folder, 17)
    assert sizes.bend(tiny).batch_size == 5
    turns: list[tuple[int, Turn]] = []
    points = sizes.measure(tiny, 1, lambda number, turn: turns.append((number, turn)))
    assert [(number, turn.offered) for number, turn in turns] == [
        (number, size) for number in (0, 1) for size in (1, 2, 4, 5, 8, 10)
    ]
    assert [point.mean_batch for point in points] == [1, 2, 4, 5, 5, 5]
    assert [point.pool_held for point in points] == [n * 3 / 17 for n in (1, 2, 4, 5, 5, 5)]
    for point in points:
        assert 0 < point.tokens_per_s_lowest <= point.tokens_per_s <= point.tokens_per_s_highest
        assert point.rounds == 2
    # A step of one that has 20.5 rows on average reads the weights and these.
    reads = [point.bandwidth_tokens_per_s for point in points]
    assert reads[:4] == sorted(reads[:4])
    assert reads[3] == reads[4] == reads[5] < 5 * reads[0]
    # 28 steps of 21 to 48 rows, then 12 of 21 to 32.
    rows = (28 * 34.5 + 12 * 26.5) / 40
    per_token = (tiny.cost.weight_bytes + rows * tiny.cost.kv_bytes_per_token) / 1e9
    assert reads[0] == pytest.approx(1 / per_token)
    product = 2e9 / tiny.cost.prefill_ops(0, 1)
    assert [point.product_tokens_per_s for point in points] == [pytest.approx(product)] * 6


def test_a_point_is_the_median_of_its_rounds() -> None:
    bend = Bend.of(10, 16, 32)
    turns = [
        Turn(3, 3.0, rate, held, limit, None, LIMITS)
        for rate, held, limit in ((50.0, 4, 100.0), (10.0, 5, 100.0), (40.0, 6, 50.0))
    ]
    point = Point.of(turns, bend)
    assert (point.tokens_per_s, point.tokens_per_s_lowest, point.tokens_per_s_highest) == (
        40.0,
        10.0,
        50.0,
    )
    assert (point.pool_held, point.bandwidth_tokens_per_s) == (0.6, 100.0)
    assert (point.of_bandwidth, point.product_tokens_per_s) == (0.5, None)


def test_a_pool_without_a_curve_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="there must be room for two"):
        BatchSizes().bend(engine(folder, 15))
    with pytest.raises(ValueError, match="264 sequences fit the KV pool, limit 256"):
        BatchSizes(prompt_tokens=10, max_tokens=7).bend(engine(folder, 264))


# The engine.


@pytest.mark.parametrize("rule", [RESERVE, RISKY], ids=["reserve", "expected"])
def test_the_answers_are_those_of_transformers(folder: Path, rule: AdmissionRule) -> None:
    requests = alike(5, 45, 24, VOCAB_SIZE)  # chunks cut prompts: a chunk has 100 tokens
    record = engine(folder, 11).run(requests, rule)
    oracle = make_llama(max_position_embeddings=4096)
    for request in requests:
        assert record.answers[request.number] == greedy(oracle, request.prompt, 24)
    assert sum(step.num_sequences for step in record.steps) == 5 * 23


def test_requests_are_sent_as_others_end_and_cancelled_after_the_last_step(folder: Path) -> None:
    requests = alike(50, 10, 11, VOCAB_SIZE)
    record = engine(folder, 40).run(requests, RESERVE, num_at_once=3, num_steps=25)
    assert [step.num_sequences for step in record.steps] == [3] * 25
    assert sorted(record.answers) == list(range(6))  # two generations of ten steps are over
    assert {step.num_ended for step in record.steps} == {0, 3, 6}


def test_one_token_answers_never_reach_decode(folder: Path) -> None:
    record = engine(folder, 4).run(alike(9, 5, 1, VOCAB_SIZE), RISKY)
    assert record.steps == []
    assert [len(record.answers[number]) for number in range(9)] == [1] * 9


def test_what_can_never_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="kv_memory_bytes is too small: 65 rows"):
        engine(folder, 4).run(alike(1, 60, 6, VOCAB_SIZE), RISKY)
    with pytest.raises(ValueError, match="4097 tokens, limit 4096"):
        engine(folder, 400).run(alike(1, 4090, 7, VOCAB_SIZE), RISKY)


# The overload.


@pytest.mark.parametrize("num_slots", [None, 2, 0], ids=["swap", "both", "return"])
def test_expected_admission_keeps_more_in_the_pool_and_changes_no_answer(
    folder: Path, num_slots: int | None
) -> None:
    tiny = engine(folder, 40, num_slots)
    requests = crowd()
    overload = Overload(risks=(0.3, 0.95), warm_up_answers=10)
    lines: list[str] = []
    (reserve, careful, risky), answers = overload.measure(tiny, requests, lines.append)
    assert (reserve.admission, reserve.risk) == ("reserve", None)
    assert (risky.admission, risky.risk) == ("expected", 0.95)
    assert len({len(answer) for answer in answers.values()}) > 5
    assert reserve.preemptions == reserve.blocks_moved == 0
    assert reserve.blocks_held < careful.blocks_held < risky.blocks_held
    assert reserve.mean_batch < risky.mean_batch
    assert reserve.steps > risky.steps
    assert risky.preemptions > 0
    assert (risky.swaps > 0, risky.returns > 0) == (num_slots != 0, num_slots is not None)
    assert (risky.blocks_moved > 0) == (num_slots != 0)
    for row in (reserve, careful, risky):
        assert 0 < row.rows_in_use < row.blocks_held <= 1
        assert row.swaps + row.returns == row.preemptions
        assert 0 < row.steps_measured < row.steps
        assert row.tokens_per_s > 0
    assert sum("% of the blocks held, " in line for line in lines) == 3
    again = overload.row(RISKY, tiny.run(requests, RISKY))
    assert replace(again, tokens_per_s=0) == replace(risky, tokens_per_s=0)


def test_swaps_that_move_nothing_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = engine(folder, 40)
    monkeypatch.setattr(tiny.mover, "run", lambda decision: None)
    with pytest.raises(AnswersDifferError, match=r"expected 0.95: the answer to request \d+"):
        Overload(risks=(0.95,), warm_up_answers=10).measure(tiny, crowd(), lambda line: None)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({1: [5, 6, 7]}, "no against 3 tokens"),
        ({0: [1, 2, 3], 1: [5, 9, 7]}, "3 against 3 tokens, other ones from 1 on"),
        ({0: [1, 2, 3], 1: [5, 6]}, "2 against 3 tokens, one begins with the other"),
    ],
)
def test_an_answer_that_differs_is_named(found: dict[int, list[int]], said: str) -> None:
    expected = {0: [1, 2, 3], 1: [5, 6, 7]}
    check_same(expected, dict(expected), "x")
    with pytest.raises(AnswersDifferError, match=said):
        check_same(expected, found, "x")


def record_of(*steps: StepRecord) -> RunRecord:
    return RunRecord({}, list(steps), 10, 160, num_preemptions=3, num_returns=1, blocks_moved=8)


def test_only_steps_count_at_which_requests_wait_and_lengths_are_known() -> None:
    def step(held: int, waiting: int, ended: int) -> StepRecord:
        return StepRecord(0.5, held // 2, 0, held, 8 * held, waiting, ended)

    overload = Overload(warm_up_answers=4)
    steps = (step(2, 9, 0), step(3, 9, 3), step(8, 9, 4), step(10, 1, 5), step(6, 0, 8))
    assert overload.row(RESERVE, record_of(*steps)) == OverloadRow(
        admission="reserve",
        risk=None,
        blocks_held=0.9,
        rows_in_use=0.45,
        mean_batch=4.5,
        tokens_per_s=9.0,
        steps_measured=2,
        steps=5,
        preemptions=3,
        swaps=2,
        returns=1,
        blocks_moved=8,
    )
    with pytest.raises(ValueError, match="no request waited once 4 answers had ended"):
        overload.row(RISKY, record_of(step(9, 0, 5), step(9, 3, 3)))


def test_chats_are_the_same_every_time_and_mixed(folder: Path) -> None:
    text = ModelText.load(folder)
    requests = chats(text, 30, 50, seed=7)
    assert requests == chats(text, 30, 50, seed=7)
    assert requests != chats(text, 30, 50, seed=8)
    assert len({request.params.seed for request in requests}) == 30
    lengths = [len(request.prompt) for request in requests]
    assert max(lengths) > 5 * min(lengths)
    assert requests[0].eos_token_ids == frozenset(text.eos_token_ids) != frozenset()
    assert text.decode(requests[0].prompt).endswith("assistant\n")


# The command.


def arguments(folder: Path, *more: str) -> list[str]:
    given = [
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--quick",
        "--rounds",
        "2",
    ]
    given += ["--kv-memory", str(180 * BLOCK_BYTES), "--requests", "24", "--max-tokens", "48"]
    return [*given, "--warm-up-answers", "2", "--risk", "0.9", *more]


@pytest.mark.usefixtures("threads_as_before")
def test_the_command_prints_lines_and_writes_page_and_plot(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batch_sizes_module, "batch_sizes", lambda bend: [1, 4])
    assert main(arguments(folder, "--out", str(tmp_path))) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    kinds = [kind for line in lines for kind in line]
    assert kinds == ["setting", *["turn"] * 4, *["point"] * 2, "trace", *["overload"] * 2]
    assert lines[0]["setting"]["bend"] == {
        "pool_blocks": 180,
        "pool_tokens": 2880,
        "sequence_tokens": 64,
        "sequence_blocks": 4,
        "batch_size": 45,
    }
    page = (tmp_path / "decode-curve.md").read_text()
    assert "180 // 4 = **45 sequences fit**" in " ".join(page.split())
    assert "(decode-curve.svg)" in page
    assert "short turns (`--quick`)" in page
    assert "Medians of 2 interleaved rounds of 20 steps" in " ".join(page.split())
    reserve, expected = (line["overload"] for line in lines[-2:])
    for row in (reserve, expected):
        cell = f"| {row['blocks_held']:.1%} | {row['rows_in_use']:.1%} | {row['mean_batch']:.1f} |"
        assert cell in page
        assert cell in printed.err
    assert "curve, round 2 of 2: 4 requests" in printed.err
    svg = ET.parse(tmp_path / "decode-curve.svg")
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert "pool full: 180 // 4 = 45" in texts
    assert f"{expected['preemptions']} preempted" in texts
    described = {child.tag.rpartition("}")[2]: child.text for child in svg.getroot()}
    assert described["title"]
    assert "from 45 on the pool of KV blocks is full" in (described["desc"] or "")
    assert f"{100 * expected['blocks_held']:.0f} % for expected" in (described["desc"] or "")


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(
    ("quick", "num_turns", "risks"),
    [(True, 1, [WorkerConfig.admission_risk]), (False, 3, list(Overload.risks))],
)
def test_short_turns_are_fewer_turns(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quick: bool,
    num_turns: int,
    risks: list[float],
) -> None:
    monkeypatch.setattr(batch_sizes_module, "batch_sizes", lambda bend: [1])
    words = arguments(folder)
    for option in ("--rounds", "--risk"):
        place = words.index(option)
        del words[place : place + 2]
    if not quick:
        words.remove("--quick")
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum("turn" in line for line in lines) == num_turns
    assert [line["overload"]["risk"] for line in lines if "overload" in line] == [None, *risks]


@pytest.mark.usefixtures("threads_as_before")
def test_only_a_page_of_short_turns_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sizes_module, "batch_sizes", lambda bend: [1])
    words = arguments(folder, "--out", str(tmp_path), "--no-plot", "--rounds", "1")
    words.remove("--quick")
    assert main(words) == 0
    page = " ".join((tmp_path / "decode-curve.md").read_text().split())
    assert "--quick" not in page
    assert "One round of 96 steps" in page


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    bend = Bend.of(10, 16, 32)
    points = [
        Point.of([Turn(n, n, 10.0 * n, n, 90.0 * n, None, LIMITS)], bend) for n in (1, 2, 4, 5)
    ]
    row = OverloadRow("expected", 0.6, 0.93, 0.85, 5.0, 40.0, 9, 12, 3, 2, 1, 8)
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, bend, points, [row])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.usefixtures("threads_as_before")
def test_what_is_wrong_is_said_before_anything_is_measured(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*more: str) -> str:
        assert main(arguments(folder, *more)) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    assert "nowhere: no such folder" in refused("--out", str(tmp_path / "nowhere"))
    assert "no such folder" in refused("--model", "/no/such/folder")
    assert "risk must be in [0, 1), got 1.5" in refused("--risk", "1.5")
    assert "there must be room for two" in refused("--kv-memory", str(7 * BLOCK_BYTES))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert '"legato[bench]"; or leave it out with --no-plot' in refused("--out", str(tmp_path))


@pytest.mark.usefixtures("threads_as_before")
def test_other_answers_fail_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_sizes_module, "batch_sizes", lambda bend: [1])
    whole_run = CapacityEngine.run

    def run(self: CapacityEngine, *given: Any, **named: Any) -> RunRecord:  # noqa: ANN401  # passed on
        record = whole_run(self, *given, **named)
        if given[1].mode is AdmissionMode.EXPECTED and 7 in record.answers:
            record.answers[7][-1] += 1
        return record

    monkeypatch.setattr(CapacityEngine, "run", run)
    assert main(arguments(folder, "--no-plot")) == 1
    assert "WRONG: expected 0.9: the answer to request 7" in capsys.readouterr().err
