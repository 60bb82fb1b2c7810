from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from demo_model import demo_model_path

from legato.bench.handoff import rates
from legato.bench.handoff.__main__ import main

pytestmark = pytest.mark.integration
SMALL = ["--rounds", "1", "--dtype", "bfloat16", "--tokens", "100"]
ROW_BYTES = 30 * 2 * 3 * 64 * 2


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    figures = json.loads(capsys.readouterr().out)
    assert isinstance(figures, dict)
    return figures


def test_every_lane_beside_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--part", "rates", "--part", "interference"]) == 0
    figures = result(capsys)["bfloat16"]
    measured = figures["rates"]
    assert measured["num_bytes"] == 100 * ROW_BYTES
    assert set(measured["gb_per_s"]) == {
        *("grpc", "shared_memory", "bare_grpc", "memcpy", "memcpy_in_and_out"),
    }
    assert set(measured["of_limit"]) == {
        *("grpc/bare_grpc", "shared_memory/memcpy", "shared_memory/memcpy_in_and_out"),
    }
    for spread in (*measured["gb_per_s"].values(), *measured["of_limit"].values()):
        assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]
    assert [run["lane"] for run in figures["interference"]] == ["grpc", "shared_memory"]
    assert all(run["p99_ratio"] > 0 for run in figures["interference"])


def test_rows_that_came_out_wrong_are_no_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "rows_digest", lambda *_: "another")
    assert main([*SMALL, "--part", "rates"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "not those that were sent" in printed.err


def test_a_sweep_has_a_line_for_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [(1 << 16, 1 << 20), (1 << 22, 1 << 24)]
    monkeypatch.setattr("legato.bench.handoff.sweep.settings", lambda: iter(tried))
    assert main([*SMALL, "--sweep"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["chunk_bytes"], line["window_bytes"]) for line in lines] == tried
    assert all({"grpc", "shared_memory", "bare_grpc"} == set(line["gb_per_s"]) for line in lines)


def test_what_a_client_feels(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = (200, 300)  # more than a decode worker would compute itself
    options = [*("--model", str(demo_model_path())), *("--threads", "1", "--rounds", "1")]
    options += itertools.chain.from_iterable(("--prompt-tokens", str(n)) for n in lengths)
    assert main([*options, "--part", "exposed"]) == 0
    exposed = result(capsys)["exposed"]
    assert [run["prompt_tokens"] for run in exposed] == list(lengths)
    for run in exposed:
        assert run["kv_bytes"] == run["prompt_tokens"] * ROW_BYTES * 2  # float32 on a CPU
        assert run["prefill_model_s"]["median"] > run["decode_step_s"]["median"] > 0


def test_what_is_given_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--tokens", "8192"], "--tokens must be in [1, 8192), got 8192"),
    ):
        with pytest.raises(SystemExit):
            main(options)
        assert message in capsys.readouterr().err
    assert main(["--part", "exposed", "--model", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
