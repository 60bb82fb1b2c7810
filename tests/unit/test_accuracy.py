from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from oracle import load_oracle
from tiny_models import make_llama_folder

from legato.bench import accuracy
from legato.bench.accuracy import compare, measure, windows_of, worker_config

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


def test_forms() -> None:
    found = {
        form: (config.weights, config.dtype, config.kv_cache)
        for form in ("bfloat16", "int8", "int4-g64+bfloat16", "float32/fp8", "keep+bfloat16/int8")
        for config in [worker_config("m", form, None)]
    }
    assert found == {
        "bfloat16": ("auto", "bfloat16", "auto"),
        "int8": ("int8", "float32", "auto"),
        "int4-g64+bfloat16": ("int4-g64", "bfloat16", "auto"),
        "float32/fp8": ("auto", "float32", "fp8"),
        "keep+bfloat16/int8": ("keep", "bfloat16", "int8"),
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--window", "1"], "--window must be at least 2, got 1"),
        (["--form", "int8", "--form", "int3"], "weights must be one of"),
        (["--form", "int8/int3"], "kv_cache must be auto, fp8 or int8, got 'int3'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy", "--model", "/no/such/folder", *words])
    try:
        status: object = accuracy.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert complaint in capsys.readouterr().err


def test_windows() -> None:
    assert windows_of([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5, 6]]
    assert windows_of([1, 2, 3, 4, 5], 3) == [[1, 2, 3], [4, 5]]


def test_compare_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    result = compare("x", "y", [[0, 1, 2]], [found], [reference])
    assert result.num_tokens == 2
    assert result.top1_agreement == 0.5
    assert result.perplexity == pytest.approx((1 / (0.5 * 0.25)) ** 0.5)
    first = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert result.mean_kl == pytest.approx(first / 2)


def test_perplexity_is_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "TEXT", TEXT)
    folder = make_llama_folder(tmp_path / "m")
    measure(str(folder), ["int8", "float32/int8"], 64, None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["form"] for line in lines] == ["float32", "int8", "float32/int8"]
    assert [line["weights"] for line in lines] == ["float32", "int8+float32", "float32"]
    assert (lines[0]["top1_agreement"], lines[0]["mean_kl"]) == (1, 0)
    assert all(0 < line["mean_kl"] < 0.1 for line in lines[1:])

    model = load_oracle(folder)
    windows = windows_of(list(TEXT.encode()), 64)
    losses = torch.tensor(0.0, dtype=torch.float64)
    for window in windows:
        ids = torch.tensor([window])
        with torch.inference_mode():
            losses += model(ids, labels=ids).loss.double() * (len(window) - 1)
    count = sum(len(window) - 1 for window in windows)
    assert lines[0]["num_tokens"] == count
    assert lines[0]["perplexity"] == pytest.approx(math.exp(float(losses) / count), rel=1e-4)


def test_a_window_beyond_the_context_is_refused(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "m")
    with pytest.raises(ValueError, match="window 513 is beyond the model's context of 512"):
        measure(str(folder), [], 513, None)
