"""Whether prefill and decode apart pay on this machine, by a measurement of some seconds.

    python -m legato.bench.disaggregation --model demo

Two workers share the machine, each with half of its cores, or with a share of its GPUs. Apart, one
computes prompts and one decodes; colocated, each does both, and a prompt holds up the streams that
run. Measured on the bare engine: a prompt, a decode step beside it, and what moving the prompt's KV
through memory takes. The rest is arithmetic, which `judge` holds. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass

PROMPT_TOKENS = 512
ANSWER_TOKENS = 128
STREAMS = 8
NUM_PROMPTS = 8
SHORT_TOKENS = 64  # of the prompts of the streams: a step reads the weights for the most part
DECODED = 12  # tokens of each answer that are measured
KV_MEMORY_BYTES = 512 << 20
COPY_BYTES = 64 << 20
# Moving the KV may cost so much of what computing it does, and is still cheap beside it.
CHEAP_HANDOFF = 0.5
# A prompt that holds up the streams for less than so many steps is hardly felt.
FELT_STEPS = 3.0


@dataclass(frozen=True)
class Measured:
    """One worker of two on this machine."""

    device: str
    num_threads: int  # of each worker
    num_devices: int  # that workers can have to themselves: GPUs, or cores on a CPU
    prefill_s: float  # of a prompt of PROMPT_TOKENS
    step_s: float  # of a decode step of STREAMS sequences
    kv_bytes: int  # of that prompt
    copy_bytes_per_s: float  # of this machine's memory


@dataclass(frozen=True)
class Verdict:
    """`pays` for even delivery, which is what disaggregation is for; `text` has the figures."""

    pays: bool
    handoff_s: float
    held_up_steps: float
    throughput_ratio: float  # apart over colocated, both with two workers
    text: str


def judge(measured: Measured) -> Verdict:
    """The rule: it pays where a prompt would be felt by the streams that run, where moving its KV
    is cheap beside computing it, and where the two workers have a core or GPU each.
    """
    # In, out, and a check of every byte at both ends.
    handoff_s = 4 * measured.kv_bytes / measured.copy_bytes_per_s
    held_up = measured.prefill_s / measured.step_s
    decode_s = ANSWER_TOKENS * measured.step_s / STREAMS
    together = 2 / (measured.prefill_s + decode_s)
    apart = min(1 / measured.prefill_s, 1 / decode_s)
    ratio = apart / together
    reasons = []
    if measured.num_devices < 2:
        kind = "GPU" if measured.device.startswith("cuda") else "core"
        reasons.append(f"there is one {kind} for both workers")
    if held_up < FELT_STEPS:
        reasons.append("a prompt is hardly felt by the streams that run")
    if handoff_s > CHEAP_HANDOFF * measured.prefill_s:
        reasons.append("moving the KV takes too long beside computing it")
    figures = (
        f"a prompt of {PROMPT_TOKENS} tokens takes {_ms(measured.prefill_s)} and holds up streams "
        f"beside it for {held_up:.0f} steps of {_ms(measured.step_s)}; moving its KV takes "
        f"{_ms(handoff_s)}; a pair serves {100 * ratio:.0f} % of the requests of two colocated "
        f"workers at {PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out"
    )
    head = f"does not pay here ({' and '.join(reasons)})" if reasons else "pays for even delivery"
    return Verdict(not reasons, handoff_s, held_up, ratio, f"{head}: {figures}")


def measure(model: str, device: str) -> Measured:
    """Loads the model and runs it: some seconds.

    Raises:
        ValueError: the model cannot be used.
    """
    import torch

    from legato.bench.bare_engine import BareEngine
    from legato.worker.config import WorkerConfig

    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2)
    config = WorkerConfig(
        model=model,
        role="colocated",
        device=device,
        kv_memory_bytes=KV_MEMORY_BYTES,
        num_threads=threads,
    )
    engine = BareEngine(config)
    draw = random.Random(1)
    vocab_size = engine.model.config.vocab_size
    prompts = [
        [draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
    ]
    short = [prompt[:SHORT_TOKENS] for prompt in prompts]
    engine.run(short[:1], 1, 2)  # warm
    one_by_one = engine.run(prompts[:2], 1, 2)
    prefill_s = min(s.seconds for s in one_by_one.steps if s.prefill_ops)
    together = engine.run(short, STREAMS, DECODED)
    step_s = statistics.median(
        s.seconds for s in together.steps if s.decode_bytes and s.num_sequences == STREAMS
    )
    on_gpu = engine.device.type == "cuda"
    return Measured(
        device=str(engine.device),
        num_threads=threads,
        num_devices=torch.cuda.device_count() if on_gpu else cores,
        prefill_s=prefill_s,
        step_s=step_s,
        kv_bytes=int(PROMPT_TOKENS * engine.cost.kv_bytes_per_token),
        copy_bytes_per_s=_copy_speed(),
    )


def _copy_speed() -> float:
    source, target = bytes(COPY_BYTES), bytearray(COPY_BYTES)
    best_s = float("inf")
    for _ in range(4):
        began_s = time.perf_counter()
        target[:] = source
        best_s = min(best_s, time.perf_counter() - began_s)
    return COPY_BYTES / best_s


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def main() -> None:
    """One JSON line: what was measured, and what it means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    measured = measure(args.model, args.device)
    print(json.dumps({"measured": asdict(measured), "verdict": asdict(judge(measured))}))


if __name__ == "__main__":
    main()
