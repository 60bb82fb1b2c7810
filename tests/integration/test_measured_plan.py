"""A profile of real workers, a plan from it, and a load on a real pair of workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from local_service import LocalService
from tiny_models import make_llama_folder

from legato.bench.profiling.run import measure_profile
from legato.bench.profiling.settings import ProfiledSettings, ProfileWorkload
from legato.cluster.cli.serve_settings import load
from legato.plan.profile import read_profile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration
COMMAND = (sys.executable, "-m", "legato.cluster.cli.main")
SMALL = ProfileWorkload(
    prefill_tokens=(16, 32, 64),
    contexts=(16, 32),
    batch_sizes=(1, 2),
    num_repeats=2,
    num_steps=8,
    budget_s=5.0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("plan") / "tiny")


async def legato(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_what_is_measured_can_be_planned_with(folder: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    settings = ProfiledSettings(
        str(folder), "cpu", "float32", "auto", "auto", 8 << 20, num_threads=1, max_batch_size=8
    )
    measured = await measure_profile(settings, SMALL, steps.append)
    assert {p.num_tokens for p in measured.prefill if not p.context_tokens} == {16, 32, 64}
    assert {p.context_tokens for p in measured.prefill} > {0}
    assert {p.num_sequences for p in measured.decode} == {1, 2}
    assert "both at once" in steps
    path = tmp_path / "profile.json"
    measured.write(path)
    assert read_profile(path) == measured
    planned = tmp_path / "legato.yaml"
    code, out, err = await legato(
        *("plan", "--profile", str(path), "--rate", "1", "--ttft-slo", "5", "--itl-slo", "2"),
        *("--input-tokens", "16..64", "--output-tokens", "8", "--one-machine"),
        *("-o", str(planned)),
    )
    assert (code, err) == (0, "")
    assert "1 prefill + 1 decode workers for 1 requests/s" in out
    assert load({}, planned).config.model == str(folder)


async def test_a_load_on_a_pair(folder: Path) -> None:
    async with LocalService(folder, worker_args=("--kv-memory", "8MiB")) as service:
        code, out, err = await legato(
            *("bench", "--address", service.address, "--concurrency", "4", "--num-requests", "12"),
            *("--input-tokens", "8..40", "--output-tokens", "2..12", "--prefix-share", "0.5"),
            *("--min-window", "0.001", "--json"),
        )
        await service.wait_idle()
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert (figures["ok"], figures["failed"]) == (12, 0)
    assert figures["server"]["kv_bytes_handed_over"] > 0
    assert figures["server"]["prefill_s"]["p50"] <= figures["ttft_s"]["p99"]
