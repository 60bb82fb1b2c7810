"""`legato plan` and `legato profile` as they are typed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from profile_values import PROFILE
from tiny_models import make_llama_folder

from legato.cluster.cli.main import main
from legato.cluster.cli.serve_settings import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

TARGETS = ("--ttft-slo", "2", "--itl-slo", "0.1")
TRAFFIC = ("--rate", "2", "--input-tokens", "50..150", "--output-tokens", "16")


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["legato", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return str(path)


def test_a_plan_from_a_profile(legato: Run, profile: str, tmp_path: Path) -> None:
    planned = tmp_path / "legato.yaml"
    code, out, err = legato("plan", "--profile", profile, *TRAFFIC, *TARGETS, "-o", str(planned))
    assert (code, err) == (0, "")
    assert "1 prefill + 1 decode workers for 2 requests/s" in out
    assert "a profile of demo on a CPU" in out
    assert load({}, planned).config.engine.num_threads == 1


def test_a_plan_from_a_datasheet_as_json(
    legato: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    capsys.readouterr()
    code, out, err = legato(
        "plan", "--gpu", "L4", "--model", str(folder / "config.json"), *TRAFFIC, *TARGETS, "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["prefill_workers"], found["decode_workers"]) == (1, 1)
    assert f"model: '{folder}'" in found["legato_yaml"]
    assert "nothing of it is measured" in found["basis"]


def test_a_trace_has_the_rate(legato: Run, profile: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_tokens": 100, "output_tokens": 16}
    trace.write_text("\n".join(json.dumps({"at_s": i / 2, **line}) for i in range(9)))
    code, out, _ = legato("plan", "--profile", profile, "--trace", str(trace), *TARGETS)
    assert (code, "workers for 2 requests/s" in out) == (0, True)


SIMULATED = ("--simulate", "--requests", "150")


def test_a_simulation_stands_beside_closed_forms(legato: Run, profile: str, tmp_path: Path) -> None:
    planned = tmp_path / "legato.yaml"
    words = ("plan", "--profile", profile, *TRAFFIC, *TARGETS, *SIMULATED)
    code, out, err = legato(*words, "-o", str(planned))
    assert (code, err) == (0, "")
    assert "simulated: 1 prefill + 1 decode, as closed forms say; fewer miss the targets" in out
    assert "of 150 requests 105 are measured" in out
    assert "# simulated TTFT p50 " in planned.read_text()


def test_the_simulation_has_the_last_word(legato: Run, profile: str) -> None:
    # Prompts that are packed into one step all wait for its end: closed forms take one by one.
    traffic = ("--rate", "18", "--input-tokens", "60..100", "--output-tokens", "4")
    words = ("plan", "--profile", profile, *traffic, "--ttft-slo", "0.7", "--itl-slo", "0.1")
    code, out, _ = legato(*words, *SIMULATED, "--percentile", "90", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["closed_forms"] == [2, 1]
    assert (found["prefill_workers"], found["decode_workers"]) == (3, 1)
    assert f"prefill: {found['prefill_workers']}" in found["legato_yaml"]
    assert found["simulated"]["num_requests"] == 150
    assert found["simulated"]["ttft_s"]["p90"]["value"] <= 0.7


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--profile", "P", *TRAFFIC, *TARGETS, "--requests", "500"), "goes with --simulate"),
        (
            ("--profile", "P", *TRAFFIC, *TARGETS, "--simulate", "--prefix-share", "0.5"),
            "--prefix-share does not go with --simulate",
        ),
        ((*TRAFFIC, *TARGETS), "--profile or --gpu says what a worker can do"),
        (("--gpu", "H100", *TRAFFIC, *TARGETS), "--model says of which model"),
        (("--gpu", "H1", "--model", "x", *TRAFFIC, *TARGETS), "no GPU 'H1'; there are A10"),
        (
            ("--gpu", "L4", "--model", "/none", *TRAFFIC, *TARGETS),
            "no such folder or file: '/none'",
        ),
        (("--profile", "P", "--model", "x", *TRAFFIC, *TARGETS), "--model goes with --gpu"),
        (("--profile", "P", *TRAFFIC[2:], *TARGETS), "--rate says how many"),
        (("--profile", "P", "--rate", "1", *TARGETS), "--input-tokens and --output-tokens say"),
        (("--profile", "P", *TRAFFIC, "--ttft-slo", "2", "--itl-slo", "0.001"), "cannot be met"),
        (
            ("--profile", "P", *TRAFFIC, *TARGETS, "--kv-memory", "1MiB"),
            "the longest request needs",
        ),
        (("--profile", "P", *TRAFFIC, *TARGETS, "--percentile", "99.9"), "99.9"),
        (("--profile", "/none.json", *TRAFFIC, *TARGETS), "/none.json: cannot be read"),
    ],
)
def test_wrong_use_gets_one_line(
    legato: Run, profile: str, words: tuple[str, ...], error: str
) -> None:
    code, out, err = legato("plan", *(profile if word == "P" else word for word in words))
    assert (code in (1, 2), out, len(err.splitlines())) == (True, "", 1)
    assert error in err


def test_a_profile_of_no_model_is_one_line(legato: Run, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    code, _, err = legato("profile", "--model", str(tmp_path / "none"), "-o", str(output))
    assert code == 1
    assert "the profile could not be measured: model: no such folder or file" in err
    assert not output.exists()
    code, _, err = legato("profile", "--model", "demo", "--kv-memory", "much")
    assert (code, "must be a size such as 512MiB" in err) == (2, True)
