"""Workload: requests over virtual time and the worker that gets them, all from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from legato.worker.priority import Priority
from legato.worker.scheduling.claim import AdmissionMode
from legato.worker.scheduling.output_lengths import PRIOR_TOKENS


@dataclass(frozen=True)
class Request:
    """What a client asks for, and what will become of it."""

    number: int  # the order of arrival
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int  # where the answer ends by itself; at most max_tokens
    max_tokens: int
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float | None = None  # after arrival
    cancel_s: float | None = None  # after arrival
    num_answers: int = 1
    content: int = 0  # requests with the same one have the same prompt, as far as both go
    local: bool = False  # the decode worker prefills it itself; of one answer

    @property
    def max_rows(self) -> int:
        """KV rows of one answer at its longest."""
        return self.num_prompt_tokens + self.max_tokens - 1


@dataclass(frozen=True)
class Workload:
    """One run of one decode worker."""

    seed: int
    requests: tuple[Request, ...]
    num_blocks: int
    block_size: int = 16
    num_slots: int = 0  # blocks of host memory
    max_batch_size: int = 64
    mode: AdmissionMode = AdmissionMode.EXPECTED
    risk: float = 0.7
    prior_tokens: int = PRIOR_TOKENS
    overlap: bool = False
    prefix_cache: bool = False
    mixes_prompts: bool = True
    step_s: float = 0.01
    prefill_s_per_token: float = 0.0001
    max_passed_over_s: float = 2.0


_POOLS = (8, 8, 12, 16, 24, 32, 48, 64, 64, 96, 128, 256, 512, 4000)


def random_workload(seed: int) -> Workload:
    """A small one: bursts, two kinds of lengths, cancels, deadlines; everything drawn from `seed`.

    The offered load is a few times the pool, so that requests wait and victims yield.
    """
    draw = random.Random(seed)
    num_blocks = draw.choice(_POOLS)
    block_size = draw.choice((1, 2, 4, 8, 16)) if num_blocks <= 64 else draw.choice((4, 16))
    pool_rows = num_blocks * block_size
    num_requests = draw.randint(8, 40) if num_blocks < 4000 else 40
    largest = min(pool_rows, 160) if num_blocks < 4000 else 8000
    short = max(1, largest // draw.choice((4, 8, 16)))
    long_share = draw.choice((0.1, 0.3, 0.5))
    batch_share = draw.choice((0.0, 0.3, 0.6))
    cancel_share = draw.choice((0.0, 0.1, 0.3))
    deadline_share = draw.choice((0.0, 0.2))
    fork_share = draw.choice((0.0, 0.2))
    num_contents = draw.choice((2, num_requests, num_requests))
    burst = draw.choice((1, 4, 16))
    draw_local = random.Random(seed + 1)  # its own: the rest is as it would be without
    local_share = draw_local.choice((0.0, 0.3, 0.9))
    requests: list[Request] = []
    now = 0.0
    for number in range(num_requests):
        if number % burst == 0:
            now += draw.expovariate(1.0) * draw.choice((0.02, 0.2))
        big = draw.random() < long_share
        room = largest if big else min(largest, 2 * short)
        prompt = draw.randint(1, max(1, room // 2))
        if draw.random() < 0.3:  # the edges of blocks are where mistakes are
            prompt = min(
                largest - 2, max(1, prompt // block_size * block_size + draw.randint(-1, 1))
            )
        prompt = max(1, prompt)
        max_tokens = draw.randint(2, max(2, room - prompt)) if largest - prompt >= 1 else 2
        if draw.random() < 0.5:  # much more than is used, as clients do
            max_tokens = max(2, largest - prompt)
        output = draw.randint(1, max_tokens) if big else draw.randint(1, min(max_tokens, short))
        if num_blocks == 4000:  # many rows, few steps
            output = min(output, draw.randint(1, 60))
        requests.append(
            Request(
                number=number,
                arrival_s=now,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                max_tokens=max_tokens,
                priority=Priority.BATCH if draw.random() < batch_share else Priority.INTERACTIVE,
                deadline_s=draw.uniform(0.1, 5) if draw.random() < deadline_share else None,
                cancel_s=draw.uniform(0, 3) if draw.random() < cancel_share else None,
                num_answers=draw.randint(2, 4) if draw.random() < fork_share else 1,
                content=number % num_contents,
                local=draw_local.random() < local_share,
            )
        )
    return Workload(
        seed=seed,
        requests=tuple(requests),
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=draw.choice((0, num_blocks // 4, num_blocks, 2 * num_blocks)),
        max_batch_size=draw.choice((2, 8, 64)) if num_blocks < 4000 else 64,
        mode=AdmissionMode.RESERVE if draw.random() < 0.1 else AdmissionMode.EXPECTED,
        risk=draw.choice((0.1, 0.5, 0.5, 0.9, 0.99)),
        prior_tokens=draw.choice((2, 8, 256)),
        overlap=draw.random() < 0.5,
        prefix_cache=draw.random() < 0.5,
        mixes_prompts=draw_local.random() < 0.7,
        prefill_s_per_token=draw.choice((0.0, 0.0001, 0.002)),
        max_passed_over_s=draw.choice((0.05, 0.5, 2.0)),
    )


def overload(
    seed: int, *, num_requests: int, num_blocks: int, mode: AdmissionMode, risk: float
) -> Workload:
    """A trace for figures: chat answers of two kinds, all there at once, max_tokens 1,024."""
    draw = random.Random(seed)
    requests = []
    for number in range(num_requests):
        long = draw.random() < 0.25
        mean = 500 if long else 80
        output = max(1, min(1024, int(draw.lognormvariate(0, 0.5) * mean)))
        requests.append(
            Request(
                number=number,
                arrival_s=number * 0.005,
                num_prompt_tokens=draw.randint(16, 512),
                num_output_tokens=output,
                max_tokens=1024,
                content=number,
            )
        )
    return Workload(
        seed=seed,
        requests=tuple(requests),
        num_blocks=num_blocks,
        num_slots=num_blocks,
        max_batch_size=256,
        mode=mode,
        risk=risk,
    )
