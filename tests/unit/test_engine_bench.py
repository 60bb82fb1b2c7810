from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracle import greedy
from tiny_models import make_llama, make_llama_folder

from legato.bench import engine as engine_bench
from legato.bench import limits as limits_bench
from legato.bench.bare_engine import BareEngine
from legato.bench.engine import fractions, worker_config
from legato.bench.limits import Limits, Rate, best_of, measure_limits
from legato.bench.workload import WORKLOADS, RequestTimes, Workload, percentile, summarise
from legato.plan.model_cost import ModelCost
from legato.worker.config import WorkerConfig

if TYPE_CHECKING:
    from pathlib import Path

KV_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("model") / "tiny")


def config(folder: Path, **changes: Any) -> WorkerConfig:  # noqa: ANN401  # passed on
    settings = {"role": "prefill", "dtype": "float32", "kv_memory_bytes": KV_BYTES} | changes
    return WorkerConfig(model=str(folder), device="cpu", **settings)


def test_the_figures_of_a_run() -> None:
    workload = Workload("x", 2, 1, prompt_tokens=10, max_tokens=3)
    times = [RequestTimes(1.0, (2.0, 2.5, 3.5)), RequestTimes(3.5, (5.5, 6.0, 6.5))]
    figures = summarise(workload, times)
    assert figures.wall_s == 5.5
    assert figures.output_tokens_per_s == 6 / 5.5
    assert figures.prompt_tokens_per_s == 20 / 5.5
    assert (figures.ttft_p50_s, figures.ttft_p99_s) == (1.0, 2.0)
    assert (figures.itl_p50_s, figures.itl_p99_s) == (0.5, 1.0)


def test_a_single_prompt_is_rated_by_its_time_to_first_token() -> None:
    figures = summarise(Workload("x", 1, 1, 10, 1), [RequestTimes(1.0, (1.5,))])
    assert figures.prompt_tokens_per_s == 20.0
    assert figures.itl_p50_s is None


@pytest.mark.parametrize("times", [[], [RequestTimes(0.0, (1.0,))]])
def test_a_run_that_lost_something_has_no_figures(times: list[RequestTimes]) -> None:
    with pytest.raises(ValueError, match=r"0 of 1 requests|1 of 2 tokens"):
        summarise(Workload("x", 1, 1, 10, 2), times)


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], rank) for rank in (1, 50, 51, 100)] == [1, 2, 3, 4]


def test_prompts_never_begin_alike() -> None:
    workload = WORKLOADS["batch32"]
    starts = [p[0] for run in range(3) for p in workload.prompts(49152, run)]
    assert len(set(starts)) == 3 * 64
    assert {len(prompt) for prompt in workload.prompts(49152)} == {128}


def test_limits_are_there_for_every_dtype_and_torch_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    limits = measure_limits(1, buffer_bytes=1 << 20, matrix_size=32, num_tries=3)
    assert torch.get_num_threads() == before
    assert set(limits.matmul_ops_per_s) == {"float32", "bfloat16", "int8"}
    rates = [limits.read_bytes_per_s, *limits.matmul_ops_per_s.values()]
    assert all(rate is None or 0 < rate.median <= rate.best for rate in rates)
    assert limits.matmul_ops_per_s["float32"] is not None


def test_limits_of_a_device_that_is_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["limits", "--device", "tpu"])
    with pytest.raises(SystemExit, match="2"):
        limits_bench.main()
    assert "--device must be auto, cpu, cuda or cuda:N, got 'tpu'" in capsys.readouterr().err


def test_a_fraction_is_the_rate_over_the_best_that_was_measured() -> None:
    limits = Limits(2, Rate(100.0, 50.0), {"float32": Rate(1000.0, 10.0), "bfloat16": None})
    near = fractions(25.0, 900.0, limits, "float32")
    assert (near.decode_of_bandwidth, near.prefill_of_matmul) == (0.25, 0.9)
    near = fractions(None, 900.0, limits, "bfloat16")
    assert (near.decode_of_bandwidth, near.prefill_of_matmul) == (None, None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_step_are_those_of_the_matrices_in_memory(
    tmp_path: Path, dtype: str, tied: bool
) -> None:
    folder = make_llama_folder(tmp_path / "m", tie_word_embeddings=tied, vocab_size=4096)
    engine = BareEngine(config(folder, dtype=dtype))
    size = {"float32": 4, "bfloat16": 2}[dtype]
    # Of make_llama: hidden 64, inner 128, 4 heads and 2 KV heads of 16, 3 layers.
    layers, head = 3 * 64 * (64 + 32 + 32 + 64 + 3 * 128), 64 * 4096
    assert (engine.cost.layer_weights, engine.cost.head_weights) == (layers, head)
    # Norms and small tables come on top; an embedding counted beside the head would be + 70 %.
    assert 1.0 <= engine.cost.weight_bytes / (size * (layers + head)) < 1.1
    assert engine.cost.kv_bytes_per_token == 3 * 2 * 2 * 16 * size
    assert engine.cost.decode_bytes([10, 5]) == engine.cost.weight_bytes + 15 * 3 * 64 * size


def test_operations_count_every_product_once() -> None:
    cost = ModelCost(0, 0, layer_weights=100, head_weights=7, attention_width=3)
    # Rows attended to by tokens 2, 3, 4 (from 0): 3 + 4 + 5; each a score and a weighted value.
    assert cost.prefill_ops(2, 5) == 2 * 100 * 3 + 2 * 7 + 2 * 2 * 3 * 12
    whole = cost.prefill_ops(0, 5)
    assert cost.prefill_ops(0, 2, num_logit_rows=0) + cost.prefill_ops(2, 5) == whole


def test_a_window_bounds_what_a_step_must_read_and_multiply() -> None:
    windows = (4, None, 4)
    cost = ModelCost(0, 30, 0, 0, attention_width=3, layer_windows=windows)  # 10 bytes a layer
    assert cost.decode_bytes([3, 100]) == 10 * ((3 + 4) + (3 + 100) + (3 + 4))
    for start, end in ((0, 3), (0, 9), (2, 9), (6, 9), (4, 4)):
        seen = [min(p + 1, w or p + 1) for w in windows for p in range(start, end)]
        assert cost.prefill_ops(start, end) == 4 * sum(seen)  # a head of width 1 in each layer


def test_the_bare_engine_answers_as_transformers_does(folder: Path) -> None:
    engine = BareEngine(config(folder, prefill_chunk_tokens=40))
    oracle = make_llama()
    # Chunks cut prompts, answers cross block edges, and requests wait for a place.
    prompts = [[(3 + 5 * n + 7 * i) % 256 for i in range(30 + n)] for n in range(5)]
    run = engine.run(prompts, num_at_once=2, max_tokens=6)
    for prompt, answer in zip(prompts, run.token_ids, strict=True):
        assert answer == greedy(oracle, prompt, 6)
    assert all(len(times.token_times_s) == 6 for times in run.requests)
    assert max(step.num_sequences for step in run.steps if step.decode_bytes) == 2
    tokens = sum(map(len, prompts))
    linear_ops = 2 * engine.cost.layer_weights * tokens
    assert linear_ops < sum(step.prefill_ops for step in run.steps) < 1.5 * linear_ops
    assert engine.run(prompts, 5, 6).token_ids == run.token_ids  # nothing is left from before


def test_one_token_answers_never_reach_decode(folder: Path) -> None:
    run = BareEngine(config(folder)).run([[1, 2, 3]], 1, 1)
    assert [step.decode_bytes for step in run.steps] == [0]
    assert run.decode_bytes_per_s is None
    assert run.prefill_ops_per_s is not None


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    engine = BareEngine(config(folder))
    with pytest.raises(ValueError, match="513 tokens, limit 512"):
        engine.run([[1] * 500], 1, 13)
    with pytest.raises(ValueError, match="kv_memory_bytes must be"):
        engine.run([[1] * 400] * 9, 9, 1)


def test_the_command_prints_a_line_for_each_workload(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {name: Workload(name, 2, 2, 8, 3) for name in ("a", "b")}
    monkeypatch.setattr(engine_bench, "WORKLOADS", tiny)
    limits = Limits(2, Rate(1e9, 1e9), {"float32": Rate(1e9, 1e9)})
    monkeypatch.setattr(engine_bench, "measure_limits", lambda *_: limits)
    threads = torch.get_num_threads()
    arguments = ["--model", str(folder), "--dtype", "float32", "--kv-memory", "1MiB"]
    try:
        assert engine_bench.main([*arguments, "--workload", "b", "--workload", "a"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["workload"]["name"] for line in lines] == ["b", "a"]
    for line in lines:
        assert line["fractions"]["decode_of_bandwidth"] == line["decode_bytes_per_s"] / 1e9
        assert line["figures"]["itl_p50_s"] > 0
        assert line["config"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"weights": "int8"}, "int8"),
        ({"weights": "int4"}, "int8"),
    ],
)
def test_a_prefill_is_measured_by_the_products_that_it_makes(
    folder: Path, settings: dict[str, str], name: str
) -> None:
    assert BareEngine(config(folder, **settings)).product_dtype == name


def test_a_wrong_model_is_said_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_bench.main(["--model", "/no/such/folder"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_setting_that_the_engine_has_not_is_named() -> None:
    assert worker_config({"model": "m", "role": "prefill", "dtype": None}).dtype == "auto"
    with pytest.raises(ValueError, match="no setting colour"):
        worker_config({"model": "m", "role": "prefill", "colour": "red"})


def test_of_two_measurements_the_better_rate_counts() -> None:
    first = Limits(2, Rate(9.0, 5.0), {"float32": Rate(3.0, 2.0), "int8": None})
    second = Limits(2, Rate(7.0, 6.0), {"float32": Rate(2.5, 1.0), "int8": None})
    assert best_of(first, second) == Limits(
        2, Rate(9.0, 6.0), {"float32": Rate(3.0, 2.0), "int8": None}
    )
