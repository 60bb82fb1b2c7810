from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from legato.kernels import native
from legato.kernels.rms_norm import add_rms_norm, rms_norm
from legato.worker.arena import Arena

pytestmark = pytest.mark.skipif(not native.available(), reason="the C kernels were not compiled")
EPS = 1e-5


def test_nothing_runs_while_it_is_recorded_and_runs_again_with_new_inputs() -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    out = torch.full_like(x, 7.0)
    with native.record() as program:
        rms_norm(x, weight, EPS, out)
        rms_norm(out, weight, EPS, out)
    assert torch.equal(out, torch.full_like(x, 7.0))
    assert program.num_ops == 2
    for _ in range(2):
        program.run(2)
        once = rms_norm(rms_norm(x, weight, EPS), weight, EPS)
        assert torch.equal(out, once)
        x.copy_(torch.randn(3, 40))


def test_operations_run_in_order_on_any_number_of_threads() -> None:
    weight = torch.ones(64)
    start = torch.randn(33, 64)
    results = []
    for num_threads in (1, 2, 3, 7):
        x, residual = start.clone(), torch.zeros(33, 64)
        with native.record() as program:
            for _ in range(200):
                add_rms_norm(x, residual, weight, EPS, x)
        program.run(num_threads)
        results.append((x, residual))
    for x, residual in results[1:]:
        assert torch.equal(x, results[0][0])
        assert torch.equal(residual, results[0][1])


def test_programs_of_two_threads_run_at_the_same_time() -> None:
    weight = torch.ones(64)
    start = torch.randn(64, 64)
    expected = start.clone()
    for _ in range(300):
        rms_norm(expected, weight, EPS, expected)
    results: list[torch.Tensor] = []

    def work() -> None:
        x = start.clone()
        with native.record() as program:
            for _ in range(300):
                rms_norm(x, weight, EPS, x)
        program.run(2)
        results.append(x)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert all(torch.equal(x, expected) for x in results)


def test_a_recording_is_of_one_thread() -> None:
    x, weight = torch.randn(2, 16), torch.randn(16)
    seen = []
    with native.record() as program:
        thread = threading.Thread(target=lambda: seen.append(rms_norm(x, weight, EPS)))
        thread.start()
        thread.join(60)
    assert program.num_ops == 0
    assert torch.equal(seen[0], rms_norm(x, weight, EPS))


def test_what_c_cannot_do_is_refused_while_recording() -> None:
    x, weight = torch.randn(2, 16).double(), torch.randn(16).double()
    with native.record(), pytest.raises(RuntimeError, match="holds C kernels only"):
        rms_norm(x, weight, EPS)
    assert not native.recording()
    with native.record(), pytest.raises(RuntimeError, match="recorded already"), native.record():
        pass
    assert not native.recording()


def test_an_empty_program_runs() -> None:
    with native.record() as program:
        pass
    program.run(2)


def test_threads_sleep_between_programs() -> None:
    code = """
import time, torch
from legato.kernels import native
from legato.kernels.rms_norm import rms_norm
x, w = torch.randn(64, 64), torch.ones(64)
with native.record() as program:
    rms_norm(x, w, 1e-5, x)
program.run(4)
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(ran.stdout) < 0.1  # CPU seconds in a second of sleep


def test_a_forked_child_has_a_team_of_its_own() -> None:
    code = """
import os, torch
from legato.kernels import native
from legato.kernels.rms_norm import rms_norm
x, w = torch.randn(64, 64), torch.ones(64)
out = torch.empty_like(x)
with native.record() as program:
    rms_norm(x, w, 1e-5, out)
program.run(3)
expected = out.tolist()
for _ in range(3):
    child = os.fork()
    if child == 0:
        out.zero_()
        program.run(3)
        os._exit(0 if out.tolist() == expected else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
program.run(3)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.split() == ["0", "0", "0"]


def test_the_arena_reuses_its_memory_and_tells_when_it_moved() -> None:
    arena, cpu = Arena(), torch.device("cpu")

    def take(*shape: int) -> torch.Tensor:
        return arena.empty(*shape, dtype=torch.float32, device=cpu)

    arena.reset()
    assert arena.generation == 0
    take(3, 5), take(7)  # more than the empty block holds
    arena.reset()
    assert arena.generation == 1
    a, b = take(3, 5), take(7)
    a.fill_(1.0)
    b.fill_(2.0)
    assert bool((a == 1.0).all())
    assert a.data_ptr() % 64 == b.data_ptr() % 64 == 0
    arena.reset()
    assert take(3, 5).data_ptr() == a.data_ptr()
    assert arena.generation == 1
    half = arena.empty(4, dtype=torch.bfloat16, device=cpu)
    assert half.dtype == torch.bfloat16
