"""`legato doctor`: what it calls a problem, what it says to do, and its exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from legato.bench.disaggregation import Measured, judge
from legato.cluster.cli import doctor as doctor_command
from legato.cluster.cli import doctor_measurements
from legato.cluster.cli import main as cli
from legato.cluster.cli.doctor_checks import (
    GIB,
    Finding,
    Level,
    check_cpu,
    check_disk,
    check_files,
    check_gpu,
    check_listening,
    check_machine,
    check_memory,
    check_shm,
)
from legato.cluster.cli.doctor_measurements import (
    check_disaggregation,
    check_ray,
    check_ray_version,
)

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM
RTX = "RTX 4090, 24564 MiB, 24000 MiB free"


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (check_cpu(frozenset({"avx2", "avx512bw", "avx512_bf16"}), 8, compiled=True), OK, "bf16"),
        (check_cpu(frozenset({"avx2"}), 2, compiled=True), OK, "2 cores, AVX2"),
        (check_cpu(frozenset({"avx2"}), 2, compiled=False), WARNING, "install a C compiler"),
        (check_cpu(frozenset({"avx2"}), 1, compiled=True), WARNING, "want a core each"),
        (check_cpu(frozenset({"sse4_2"}), 8, compiled=True), WARNING, "no AVX2"),
        (check_memory(8 * GIB), OK, "8.0 GiB available"),
        (check_memory(2 * GIB), WARNING, "lower --kv-memory"),
        (check_memory(GIB), PROBLEM, "lower --kv-memory"),
        (check_gpu([], "2.13.0+cpu", None), OK, "--device auto takes the CPU"),
        (check_gpu([RTX], "2.13.0", "3.6.0"), OK, "1: RTX 4090"),
        (check_gpu([RTX], "2.13.0+cpu", "3.6.0"), PROBLEM, "pip install a torch with CUDA"),
        (check_gpu([RTX], None, None), PROBLEM, "torch is missing has no CUDA"),
        (check_gpu([RTX], "2.13.0", None), PROBLEM, "pip install 'legato[gpu]'"),
        (check_gpu("nvidia-smi: no driver", "2.13.0", None), WARNING, "--device cpu"),
        (check_files(65536), OK, "65,536 at most"),
        (check_files(-1), OK, "no limit"),
        (check_files(2048), WARNING, "ulimit -n 65536"),
        (check_files(256), PROBLEM, "ulimit -n 65536"),
        (check_ray_version("2.60.0", "2.60"), OK, "2.60.0"),
        (check_ray_version("2.9.3", "2.60"), PROBLEM, "pip install 'ray>=2.60'"),
        (check_ray_version("3.0.0", "2.60"), OK, "3.0.0"),
        (check_ray_version(None, "2.60"), PROBLEM, "pip install 'ray>=2.60'"),
    ],
)
def test_what_is_found_is_judged_and_says_what_to_do(
    found: Finding, level: Level, words: str
) -> None:
    assert found.level is level
    assert words in f"{found.text}; {found.fix}"
    assert bool(found.fix) is (level is not OK)


def test_disks_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "not" / "yet"  # that of the nearest folder that is there counts
    assert check_disk("d", missing, 1, 1, "fix").level is OK
    assert check_disk("d", missing, 1 << 60, 1, "fix").level is WARNING
    assert check_disk("d", missing, 1 << 60, 1 << 60, "fix").level is PROBLEM
    monkeypatch.setattr("os.access", lambda *_: False)
    found = check_disk("d", missing, 1, 1, "fix")
    assert (found.level, found.text) == (PROBLEM, f"{tmp_path} cannot be written")
    usage = type("Usage", (), {"free": GIB // 2})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    found = check_shm(tmp_path)
    assert (found.level, "--shm-size 2g" in found.fix) == (WARNING, True)
    assert check_shm(tmp_path / "none").level is WARNING


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = check_listening(port)
        assert found.level is WARNING
        assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in found.text
        found = check_listening(port, name="HTTP port", option="--http-port")
        assert (found.name, found.level) == ("HTTP port", WARNING)
        assert found.text.endswith("is in use; choose another with --http-port")
    assert check_listening(port).level is OK
    assert check_listening(65_536, option="--http-port").fix == "choose another with --http-port"


def test_this_machine_is_looked_at_as_a_whole() -> None:
    found = check_machine(0)
    assert {each.name for each in found} == {
        "CPU", "memory", "GPU", "disk for models", "disk for Ray", "shared memory", "open files",
        "port", "HTTP port",
    }  # fmt: skip
    assert all(each.text for each in found)


def test_ray_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_measurements, "running_cluster", lambda: None)
    assert check_ray(None)[1].text == "none: a Ray of our own is started"
    monkeypatch.setattr(doctor_measurements, "running_cluster", lambda: "h:1")
    assert "--ray-address auto would join it" in check_ray(None)[1].text
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    _, cluster = check_ray(f"127.0.0.1:{port}")
    assert cluster.level is PROBLEM
    assert "no Ray cluster answers at" in cluster.text
    assert "ray start --head" in cluster.text


def doctor(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["legato", "doctor", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("level", "code"), [(OK, 0), (WARNING, 0), (PROBLEM, 1)])
def test_its_lines_its_json_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, level: Level, code: int
) -> None:
    found = Finding("thing", level, "as it is", "mend it")
    monkeypatch.setattr(doctor_command, "check_machine", lambda _: [found])
    monkeypatch.setattr(doctor_command, "check_ray", lambda _: [])
    paying = Finding("disaggregation", OK, "pays")
    monkeypatch.setattr(doctor_command, "check_disaggregation", lambda: paying)
    assert doctor(monkeypatch) == code
    assert capsys.readouterr().out == (
        f"{level.value:8}thing: as it is; mend it\nok      disaggregation: pays\n"
    )
    assert doctor(monkeypatch, "--no-measure", "--json") == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": not code,
        "findings": [{"name": "thing", "level": level.value, "text": "as it is", "fix": "mend it"}],
    }


# --- whether it pays ---------------------------------------------------------------------------


def measured(**more: float) -> Measured:
    figures = {
        "num_devices": 2, "prefill_s": 0.4, "step_s": 0.01, "kv_bytes": 10**7,
        "copy_bytes_per_s": 5e9,
    }  # fmt: skip
    return Measured(device="cpu", num_threads=1, **(figures | more))  # type: ignore[arg-type]  # as named


def test_it_pays_where_prompts_are_felt_and_their_kv_moves_quickly() -> None:
    verdict = judge(measured())
    assert verdict.pays
    assert verdict.handoff_s == pytest.approx(0.008)
    assert verdict.held_up_steps == pytest.approx(40)
    # Both at once: 2 / (0.4 + 0.16); apart: prefill is the slower half.
    assert verdict.throughput_ratio == pytest.approx(2.5 / (2 / 0.56))
    assert verdict.text.startswith("pays for even delivery: a prompt of 512 tokens takes 400 ms")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_devices": 1}, "there is one core for both workers"),
        ({"prefill_s": 0.02}, "a prompt is hardly felt"),
        ({"copy_bytes_per_s": 1e8}, "moving the KV takes too long"),
    ],
)
def test_where_it_does_not_pay_the_reason_is_told(more: dict[str, float], reason: str) -> None:
    verdict = judge(measured(**more))
    assert not verdict.pays
    assert verdict.text.startswith(f"does not pay here ({reason}")


@pytest.mark.parametrize(
    ("ran", "level", "text"),
    [
        ((0, 'x\n{"verdict": {"pays": true, "text": "pays"}}\n', ""), OK, "pays"),
        ((1, "", "Traceback\nValueError: no model\n"), WARNING, "not measured: ValueError: no "),
        ((-9, "", ""), WARNING, "not measured: it ended without a word"),
        (None, WARNING, "not measured within 180 s"),
    ],
)
def test_a_measurement_that_fails_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, ran: tuple[int, str, str] | None, level: Level, text: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if ran is None:
            raise subprocess.TimeoutExpired(command, 180)
        return subprocess.CompletedProcess(command, *ran)

    monkeypatch.setattr(subprocess, "run", run)
    found = check_disaggregation()
    assert found.level is level
    assert found.text.startswith(text)
