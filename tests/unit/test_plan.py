"""The plan: workers against load and targets, the files that it reads, and the one it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_values import PROFILE
from tiny_models import make_llama_folder

from legato.bench.plan_workloads import predict
from legato.cluster.cli.serve_settings import load
from legato.plan.answer import make_answer
from legato.plan.basis import profile_basis
from legato.plan.datasheets import DATASHEETS, datasheet
from legato.plan.lengths import Lengths
from legato.plan.model_cost import ModelCost
from legato.plan.model_files import read_model
from legato.plan.pool_sizes import MAX_WORKERS, smallest_pools
from legato.plan.prediction import Predictor, Slowdown, WorkerSize
from legato.plan.profile import Profile, read_profile
from legato.plan.service_file import PlannedWorker, service_file
from legato.plan.step_times import MeasuredTimes, RooflineTimes
from legato.plan.targets import Targets
from legato.plan.trace import read_trace
from legato.plan.traffic import Traffic

if TYPE_CHECKING:
    from pathlib import Path

EIGHT_B = ModelCost(16_000_000_000, 131_072, 7_500_000_000, 500_000_000, 131_072, (None,) * 32)
TIMES = RooflineTimes.of(EIGHT_B, DATASHEETS["H100"], link_bytes_per_s=25e9)
SIZE = WorkerSize(kv_rows=400_000, max_batch_size=256)
TARGETS = Targets(ttft_s=1.0, itl_s=0.03)
INPUTS, OUTPUTS = Lengths.parse("lognormal:800:0.8:8000"), Lengths.parse("lognormal:200:0.7:1500")


def predictor(
    rate_per_s: float = 20.0,
    targets: Targets = TARGETS,
    size: WorkerSize = SIZE,
    slowdown: Slowdown | None = None,
) -> Predictor:
    traffic = Traffic.of(rate_per_s, INPUTS, OUTPUTS)
    return Predictor(TIMES, traffic, size, targets, slowdown or Slowdown())


def total(made: Predictor) -> int:
    pools = smallest_pools(made.meets)
    assert pools is not None
    return sum(pools)


@settings(max_examples=12, deadline=None)
@given(rate=st.floats(0.5, 200), more=st.floats(1.0, 4.0))
def test_more_traffic_never_needs_fewer_workers(rate: float, more: float) -> None:
    assert total(predictor(rate)) <= total(predictor(rate * more))


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(0.5, 100),
    ttft_s=st.floats(0.6, 3),
    itl_s=st.floats(0.02, 0.1),
    tighter=st.floats(0.7, 1.0),
)
def test_tighter_targets_never_need_fewer_workers(
    rate: float, ttft_s: float, itl_s: float, tighter: float
) -> None:
    loose, tight = Targets(ttft_s, itl_s), Targets(ttft_s * tighter, itl_s * tighter)
    try:
        needed = total(predictor(rate, tight))
    except ValueError:  # no number would do
        return
    assert total(predictor(rate, loose)) <= needed


@settings(max_examples=10, deadline=None)
@given(rate=st.floats(0.5, 60), prefill=st.integers(1, 12), decode=st.integers(1, 12))
def test_a_worker_more_makes_nothing_worse(rate: float, prefill: int, decode: int) -> None:
    made = predictor(rate, slowdown=Slowdown(1.2, 1.4))
    before = made.predict(prefill, decode)
    for after in (made.predict(prefill + 1, decode), made.predict(prefill, decode + 1)):
        if before is None:
            continue
        assert after is not None
        # Where pools share machines, a less busy one also slows the other less.
        assert after.ttft_s[99.0] <= before.ttft_s[99.0] * 1.0001
        assert after.itl_s[99.0] <= before.itl_s[99.0] * 1.0001


def test_the_pools_are_the_smallest_of_all() -> None:
    made = predictor(40.0)
    pools = smallest_pools(made.meets)
    assert pools is not None
    smaller = [
        (prefill, decode)
        for prefill in range(1, sum(pools))
        for decode in range(1, sum(pools) - prefill)
        if made.meets(prefill, decode)
    ]
    assert smaller == []
    assert made.meets(*pools)


@settings(max_examples=30)
@given(a=st.integers(1, 40), b=st.integers(1, 40), both=st.integers(2, 90))
def test_the_search_finds_what_trying_all_would(a: int, b: int, both: int) -> None:
    def meets(prefill: int, decode: int) -> bool:
        return prefill >= a and decode >= b and prefill + 2 * decode >= both

    tried = min(p + d for p in range(1, 100) for d in range(1, 100) if meets(p, d))
    found = smallest_pools(meets)
    assert found is not None
    assert meets(*found)
    assert sum(found) == tried
    assert smallest_pools(lambda p, d: p > MAX_WORKERS) is None


def test_what_limits_a_batch() -> None:
    assert predictor().batch_reason == "largest batch allowed"
    assert predictor(size=replace(SIZE, kv_rows=50_000)).batch_reason == "KV memory"
    tight = predictor(targets=Targets(1.0, 0.0095, 50))
    assert tight.batch_reason == "ITL target"
    assert tight.step_s(tight.batch_limit) <= 0.0095 < tight.step_s(tight.batch_limit + 1)


def test_the_answer_names_where_kv_runs_out() -> None:
    made = predictor(20.0, size=replace(SIZE, kv_rows=50_000))
    answer = make_answer(made, EIGHT_B.kv_bytes_per_token)
    assert answer.max_batch_size == answer.kv_sequences_per_decode_worker
    assert answer.kv_full_at_rate is not None
    assert answer.saturates_at_rate >= 20.0
    mean = float(Traffic.of(1.0, INPUTS, OUTPUTS).prompt_tokens.mean())
    assert answer.link_bytes_per_s == pytest.approx(20 * mean * 131_072)
    json.dumps(answer.as_json())
    # Little's law: answers of a second, times the seconds each is in the batch, times its rows.
    steps = float(made.traffic.decoded_tokens.mean())
    low = 20 / answer.decode_workers * steps * made.step_s(1) * made.room.rows_mean
    high = 20 / answer.decode_workers * steps * made.step_s(answer.max_batch_size)
    assert low <= answer.kv_rows_mean <= high * made.room.rows_mean


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (Targets(1.0, 0.005), "a decode step of one sequence takes"),
        (Targets(0.01, 0.05), "without any wait 99 % of first tokens take"),
    ],
)
def test_targets_that_no_number_of_workers_meets_are_refused(targets: Targets, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        predictor(targets=targets)


def test_a_slow_link_misses_the_itl_target_by_its_first_gaps() -> None:
    times = RooflineTimes.of(EIGHT_B, DATASHEETS["H100"], link_bytes_per_s=0.1e9)
    short_answers = Traffic.of(1.0, INPUTS, Lengths.parse("20"))
    with pytest.raises(ValueError, match=r"in which the KV is handed over.*5\.3 % of all gaps"):
        Predictor(times, short_answers, SIZE, TARGETS)


def test_pools_that_share_a_machine_slow_each_other() -> None:
    alone, shared = predictor(), predictor(slowdown=Slowdown(1.5, 1.5))
    apart, together = alone.predict(4, 4), shared.predict(4, 4)
    assert apart is not None
    assert together is not None
    assert together.itl_s[50.0] > apart.itl_s[50.0]
    assert together.ttft_s[50.0] > apart.ttft_s[50.0]


# Profiles.


def profile(**changes: Any) -> Profile:  # noqa: ANN401  # passed on
    return Profile.model_validate(PROFILE | changes)


def test_measured_times_go_through_the_points_and_on() -> None:
    times = MeasuredTimes(profile())
    assert times.prefill_s(100) == pytest.approx(0.1)
    assert times.prefill_s(150) == pytest.approx(0.16)
    assert times.prefill_s(10) == pytest.approx(0.1)  # not measured: at most that
    # Beyond: 1.0, 1.1 ms a token and 1.2 at 300.
    assert times.prefill_s(300) == pytest.approx(0.36)
    assert times.prefill_s(100, 100) == pytest.approx(0.11)
    assert times.prefill_s(100, 200) == pytest.approx(0.12)
    assert times.decode_s(1, 200) == pytest.approx(0.021)
    assert times.decode_s(3, 3 * 100) == pytest.approx(0.030)
    assert times.decode_s(9, 9 * 300) == pytest.approx(0.050 + 4 * 0.007)
    assert times.handoff_s(5000) == pytest.approx(0.01)


def test_a_check_asks_for_a_share_of_what_the_pair_can_serve() -> None:
    basis = profile_basis(profile(), None, None)
    inputs, outputs = Lengths.parse("100..200"), Lengths.parse("8")
    rate, found = predict(basis, inputs, outputs, 0.5)
    mean_s = float(np.mean([basis.times.prefill_s(n) for n in range(100, 201)]))
    # Prefill is the slower one, and as slow as it is beside a decode worker that is hardly busy.
    assert found.prefill_busy == pytest.approx(rate * mean_s, rel=0.1)
    assert 0.4 < found.prefill_busy <= 0.52


def test_scatter_of_gaps_is_in_the_prediction() -> None:
    traffic = Traffic.of(0.5, Lengths.parse("100"), Lengths.parse("200"))
    wide = profile(step_jitter=[0.5, 1.0, 1.0, 3.0])
    even = profile(step_jitter=[1.0])
    found = {}
    for name, made in (("wide", wide), ("even", even)):
        basis = profile_basis(made, None, None)
        predicted = Predictor(basis.times, traffic, basis.size, Targets(5, 5)).predict(1, 1)
        assert predicted is not None
        found[name] = predicted.itl_s
    assert found["wide"][90.0] == pytest.approx(3 * found["even"][50.0], rel=0.2)
    assert found["wide"][50.0] == pytest.approx(found["even"][50.0], rel=0.1)


def test_noise_makes_nothing_shorter_that_is_more() -> None:
    noisy = [dict(p) for p in PROFILE["decode"]]
    noisy[2]["seconds"] = 0.015
    times = MeasuredTimes(profile(decode=noisy))
    steps = [times.decode_s(k, 100 * k) for k in range(1, 12)]
    assert steps == sorted(steps)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    assert read_profile(path) == profile()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version"),
        ({"colour": 1}, "colour: Extra inputs are not permitted"),
        ({"prefill": PROFILE["prefill"][:1]}, "prefill"),
        ({"decode": PROFILE["decode"][:2]}, "decode must have two numbers of sequences"),
        ({"link_bytes_per_s": -1}, "link_bytes_per_s"),
        ({"decode_slowdown": 0.5}, "decode_slowdown"),
    ],
)
def test_a_profile_that_is_none_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE | changes))
    with pytest.raises(ValueError, match=words):
        read_profile(path)


# Models, GPUs, traces, service files.


def test_a_model_is_read_from_its_folder_and_from_its_config_alone(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    whole, alone = read_model(str(folder)), read_model(str(folder / "config.json"))
    assert whole == alone
    config = whole.config
    itemsize = {"float32": 4, "bfloat16": 2}[whole.dtype]
    per_layer = config.hidden_size * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        + 3 * config.intermediate_size
    )
    head = config.hidden_size * config.vocab_size
    assert whole.cost.weight_bytes == (config.num_layers * per_layer + head) * itemsize
    smaller = read_model(str(folder), weights="int8")
    assert smaller.cost.weight_bytes == config.num_layers * per_layer + head * itemsize
    with pytest.raises(ValueError, match="no such folder or file"):
        read_model(str(tmp_path / "none"))


def test_gpus_by_name() -> None:
    assert datasheet("h100").memory_bytes == 80e9
    assert all(sheet.source for sheet in DATASHEETS.values())
    with pytest.raises(ValueError, match=r"no GPU 'A100'; there are .*A100-80GB"):
        datasheet("A100")


def test_a_trace_has_its_own_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 2.0, "input_tokens": 5, "output_tokens": 6}\n\n'
        '{"at_s": 0.0, "input_tokens": 7, "output_tokens": 8}\n'
    )
    lines = read_trace(path)
    assert [line.input_tokens for line in lines] == [7, 5]
    traffic = Traffic.of_trace(lines)
    assert traffic.rate_per_s == 0.5
    assert np.array_equal(traffic.output_tokens, [8, 6])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no request"),
        ('{"input_tokens": 1}', r"trace.jsonl:1: output_tokens: Field required"),
        ('{"input_tokens": 0, "output_tokens": 1}', "input_tokens"),
        ('{"input_tokens": 1, "output_tokens": 1, "colour": 3}', "colour"),
        (
            '{"input_tokens": 1, "output_tokens": 1}\n'
            '{"at_s": 1, "input_tokens": 1, "output_tokens": 1}',
            "some lines have at_s",
        ),
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_trace(path)


def test_the_service_file_is_what_the_settings_read(tmp_path: Path) -> None:
    answer = make_answer(predictor(), EIGHT_B.kv_bytes_per_token)
    worker = PlannedWorker("it's: #1", "cuda", "bfloat16", "int8", "fp8", 50 << 30, 4)
    path = tmp_path / "legato.yaml"
    path.write_text(service_file(answer, worker, "planned\nby numbers"))
    read = load({}, path).config
    assert (read.prefill_workers, read.decode_workers) == (
        answer.prefill_workers,
        answer.decode_workers,
    )
    assert read.model == "it's: #1"
    assert read.engine.kv_memory_bytes == 50 << 30
    assert read.engine.max_batch_size == answer.max_batch_size
    assert (read.engine.weights, read.engine.kv_cache) == ("int8", "fp8")
    assert read.engine.num_threads == 4
