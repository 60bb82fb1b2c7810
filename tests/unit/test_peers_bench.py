"""The comparison with peers, against runners that answer, refuse, die and hang."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_models import make_llama_folder

from legato.bench.limits import Limits, Rate
from legato.bench.peers import __main__ as peers_bench
from legato.bench.peers.comparison import Turn, rows, table
from legato.bench.peers.machine_load import MachineLoad
from legato.bench.peers.peer_process import PeerError, PeerProcess
from legato.bench.peers.shapes import SHAPES, Shape, write_model
from legato.bench.workload import Figures, Workload
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = Limits(2, Rate(1e9, 1e9), {"bfloat16": Rate(1e12, 1e12)})
RUNNER = """
import os, subprocess, sys, time

PRECISIONS = ("fp32",)

def prepare(model, precision, work_dir):
    print("talk that is no answer")
    return model

class Runner:
    version = "fake 1"

    def __init__(self, path, precision, num_threads):
        self.threads = num_threads

    def run(self, prompts, num_at_once, max_tokens):
        if max_tokens == 66:
            sys.stderr.write("out of luck\\n")
            os._exit(3)
        if max_tokens == 77:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(os.environ["FAKE_PIDS"], "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if max_tokens == 88:
            raise KeyError("asked for too much")
        if max_tokens == 99:
            prompts = prompts[1:]
        now = time.perf_counter()
        times = [now + 0.01 * (i + 1) for i in range(max_tokens)]
        requests = [
            {"sent_s": now, "token_times_s": times, "token_ids": [p[0]] * max_tokens}
            for p in prompts
        ]
        return {"requests": requests, "omp": os.environ["OMP_NUM_THREADS"]}
"""


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    file = tmp_path / "fake_runner.py"
    file.write_text(RUNNER)
    return file


async def loaded(peer: PeerProcess) -> None:
    answer = await peer.ask(30, op="load", path="p", precision="fp32", num_threads=2)
    assert answer["version"] == "fake 1"


async def run(peer: PeerProcess, max_tokens: int, timeout_s: float = 30) -> dict[str, Any]:
    return await peer.ask(
        timeout_s, op="run", prompts=[[5], [6]], num_at_once=1, max_tokens=max_tokens
    )


async def test_a_peer_answers_and_what_it_prints_is_no_answer(runner: Path) -> None:
    async with PeerProcess(sys.executable, runner, 2) as peer:
        request = {"op": "prepare", "model": "m", "work_dir": "w"}
        assert (await peer.ask(30, **request, precision="fp32"))["path"] == "m"
        assert (await peer.ask(30, **request, precision="int4"))["path"] is None
        await loaded(peer)
        answer = await run(peer, 2)
        assert [request["token_ids"] for request in answer["requests"]] == [[5, 5], [6, 6]]
        assert answer["omp"] == "2"


async def test_an_exception_is_an_answer_and_the_peer_lives_on(runner: Path) -> None:
    async with PeerProcess(sys.executable, runner, 2) as peer:
        with pytest.raises(PeerError, match="unknown, or comes before load"):
            await run(peer, 2)
        await loaded(peer)
        with pytest.raises(PeerError, match="KeyError: 'asked for too much'"):
            await run(peer, 88)
        assert await run(peer, 2)


async def test_a_peer_that_dies_is_reported_with_its_last_words(runner: Path) -> None:
    async with PeerProcess(sys.executable, runner, 2) as peer:
        await loaded(peer)
        with pytest.raises(
            PeerError, match=r"died during run \(exit status 3\): (?s:.*)out of luck"
        ):
            await run(peer, 66)


async def test_a_peer_that_hangs_is_ended_with_its_children(
    runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAKE_PIDS", str(pids))
    async with PeerProcess(sys.executable, runner, 2) as peer:
        await loaded(peer)
        with pytest.raises(PeerError, match="no answer to run within 3 s"):
            await run(peer, 77, timeout_s=3)
    numbers = [int(word) for word in pids.read_text().split()]
    assert len(numbers) == 2
    assert [number for number in numbers if lives(number)] == []


async def test_an_environment_that_is_none_is_an_error(runner: Path) -> None:
    with pytest.raises(PeerError, match="does not start"):
        async with PeerProcess("/no/such/python", runner, 2):
            pass
    async with PeerProcess(sys.executable, runner.with_name("missing.py"), 2) as peer:
        with pytest.raises(PeerError, match="died during load"):
            await loaded(peer)


def lives(process_id: int) -> bool:
    """Not for long after its end: it is up to init to collect a child's child."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        try:
            os.kill(process_id, 0)
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


async def test_our_own_engine_is_behind_the_same_protocol(tmp_path: Path) -> None:
    model = make_llama_folder(tmp_path / "model")
    file = Path(peers_bench.__file__).with_name("legato_runner.py")
    async with PeerProcess(sys.executable, file, 1) as ours:
        path = (await ours.ask(60, op="prepare", model=str(model), precision="bf16", work_dir=""))[
            "path"
        ]
        await ours.ask(60, op="load", path=path, precision="fp32", num_threads=1)
        answer = await run(ours, 4)
    assert [len(request["token_ids"]) for request in answer["requests"]] == [4, 4]
    assert answer["requests"][0]["token_times_s"][0] > answer["requests"][0]["sent_s"]
    assert answer["decode_bytes_per_s"] > 0
    assert answer["prefill_ops_per_s"] > 0


def turn(round_number: int, contender: str, value: float, metric: str, token: int = 1) -> Turn:
    at_once, max_tokens = {"itl_p50_s": (1, 4), "output_tokens_per_s": (2, 4)}.get(metric, (1, 1))
    values: dict[str, Any] = dict.fromkeys(Figures.__dataclass_fields__, 0.0)
    return Turn(
        round_number=round_number,
        contender=contender,
        precision="bf16",
        workload=Workload(metric, at_once, at_once, 8, max_tokens),
        figures=Figures(**values | {metric: value}),
        first_token_ids=[token, 2],
        limits=LIMITS,
        others_share=0.01 * round_number,
        decode_of_bandwidth=0.1 * (round_number + 1) if contender == "legato" else None,
    )


@pytest.mark.parametrize(
    ("metric", "best", "ratio", "spread"),
    [
        # Medians: ours 20, a 40, b 30. A time is better when lower, a rate when higher.
        ("itl_p50_s", "b", 30 / 20, (30 / 25, 30 / 10)),
        ("output_tokens_per_s", "a", 20 / 40, (10 / 40, 25 / 30)),
        ("prompt_tokens_per_s", "a", 20 / 40, (10 / 40, 25 / 30)),
    ],
)
def test_the_ratio_is_that_of_medians_against_the_best_peer(
    metric: str, best: str, ratio: float, spread: tuple[float, float]
) -> None:
    values = {"legato": (10.0, 20.0, 25.0), "a": (40.0, 50.0, 30.0), "b": (30.0, 30.0, 30.0)}
    turns = [turn(r, name, v[r], metric) for r in range(3) for name, v in values.items()]
    (row,) = rows(turns)
    assert row.values == {"legato": 20.0, "a": 40.0, "b": 30.0}
    assert (row.best_peer, row.metric) == (best, metric)
    assert row.ratio == pytest.approx(ratio)
    assert (row.ratio_lowest, row.ratio_highest) == pytest.approx(spread)
    assert row.decode_of_bandwidth == pytest.approx(0.2)
    assert row.others_share == 0.02
    assert row.same_first_tokens == 1.0


def test_peers_that_compute_something_else_are_seen() -> None:
    turns = [turn(0, "legato", 1.0, "itl_p50_s"), turn(0, "a", 1.0, "itl_p50_s", token=9)]
    assert rows(turns)[0].same_first_tokens == 0.5


def test_a_row_without_ours_or_without_peers_has_no_ratio() -> None:
    for name in ("legato", "a"):
        (row,) = rows([turn(0, name, 0.012, "itl_p50_s")])
        assert row.ratio is None
        text = table([row], ["legato", "a"])
        assert "12.0" in text
        assert "–" in text


def test_the_table_has_a_line_for_each_row() -> None:
    turns = [
        turn(0, name, value, metric)
        for metric, values in (
            ("itl_p50_s", {"legato": 0.010, "a": 0.012}),
            ("output_tokens_per_s", {"legato": 30.0}),
        )
        for name, value in values.items()
    ]
    head, _, first, second = table(rows(turns), ["legato", "a"]).splitlines()
    assert head.split(" | ")[3:5] == ["legato", "a"]
    assert "| ITL ms | 10.0 | 12.0 | 1.20 (1.20–1.20) | 10% |" in first
    assert "| output tok/s | 30.0 | – | – | – |" in second


def test_the_share_of_others_is_what_is_busy_and_not_the_peer() -> None:
    start = MachineLoad(busy_s=100.0, idle_s=50.0, process_s=5.0)
    assert start.others_share(MachineLoad(108.0, 52.0, 11.0)) == pytest.approx(0.2)
    assert start.others_share(MachineLoad(108.0, 52.0, 13.0)) == 0.0
    assert start.others_share(start) == 0.0
    now = MachineLoad.now(os.getpid())
    assert now.busy_s > 0
    assert now.process_s > 0


def test_written_shapes_are_models_that_load(tmp_path: Path) -> None:
    assert set(SHAPES) == {"smollm2-135m", "tinyllama-1.1b"}
    for tied in (False, True):
        shape = Shape(64, 96, 2, 4, 2, 128, 256, 10000.0, tie_word_embeddings=tied)
        write_model(shape, tmp_path / str(tied))
        checkpoint = open_checkpoint(tmp_path / str(tied))
        assert checkpoint.config.num_kv_heads == 2
        assert checkpoint.config.tie_word_embeddings is tied


@pytest.fixture
def compare(
    tmp_path: Path, runner: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], list[str]]:
    """The command's arguments for two fakes, for answers of so many tokens: ours never fails."""
    model = make_llama_folder(tmp_path / "model")
    ours = tmp_path / "ours_runner.py"
    ours.write_text(RUNNER.replace("max_tokens ==", "not").replace("0.01", "0.02"))
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    async def limits(num_threads: int) -> Limits:
        return LIMITS

    monkeypatch.setattr(peers_bench, "_limits", limits)
    monkeypatch.setitem(peers_bench.RUNNERS, "llamacpp", str(runner))
    monkeypatch.setitem(peers_bench.RUNNERS, "legato", str(ours))

    def arguments(max_tokens: int) -> list[str]:
        workload = Workload("single", 2, 1, 8, max_tokens)
        monkeypatch.setattr(peers_bench, "WORKLOADS", {"single": workload})
        return [
            "--model", str(model), "--venv", f"llamacpp={tmp_path / 'venv'}", "--workload",
            "single", "--precision", "fp32", "--rounds", "2", "--tries", "1",
            "--work-dir", str(tmp_path / "work"),
        ]  # fmt: skip

    return arguments


def test_rounds_alternate_and_end_in_a_table(
    compare: Callable[[int], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert peers_bench.main(compare(3)) == 0
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    turns = [line["turn"] for line in lines if "turn" in line]
    order = [(turn["round_number"], turn["contender"]) for turn in turns]
    assert order == [(0, "legato"), (0, "llamacpp"), (1, "legato"), (1, "llamacpp")]
    (row,) = [line["row"] for line in lines if "row" in line]
    assert row["best_peer"] == "llamacpp"
    assert row["values"] == pytest.approx({"legato": 0.02, "llamacpp": 0.01})
    assert row["ratio"] == pytest.approx(0.5)
    assert "| single | fp32 | ITL ms | 20.0 | 10.0 | 0.50 (0.50–0.50) |" in output.err


@pytest.mark.parametrize(("max_tokens", "word"), [(66, "died"), (88, "KeyError"), (99, "1 of 2")])
def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on(
    compare: Callable[[int], list[str]],
    capfd: pytest.CaptureFixture[str],
    max_tokens: int,
    word: str,
) -> None:
    assert peers_bench.main(compare(max_tokens)) == 1
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    (failure,) = [line["failure"] for line in lines if "failure" in line]
    assert word in failure["error"]
    assert sum("turn" in line for line in lines) == 2  # ours, in both rounds
    assert word in output.err


def test_an_unknown_peer_or_environment_is_refused(tmp_path: Path) -> None:
    for given in ("nobody=/tmp", f"llamacpp={tmp_path}", "legato=/tmp"):
        with pytest.raises(SystemExit):
            peers_bench.main(["--model", str(tmp_path), "--venv", given])
