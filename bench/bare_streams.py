"""BareStreams: requests that come at any time to one bare engine, which prefills and decodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from legato.worker.kv.block_lease import BlockLease
from legato.worker.sampler import SamplingRow, sample
from legato.worker.sampling_params import SamplingParams
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule, Newcomer
from legato.worker.sequence import Sequence

if TYPE_CHECKING:
    from legato.worker.kv.block_pool import BlockPool
    from legato.worker.model_runner import ModelRunner

_MAX_BATCH = 256


class BareStreams:
    """What a colocated worker's engine does on a CPU: prompts in pieces beside those that decode.

    Every request has room for its longest answer when it is added, so nobody is ever preempted.
    """

    def __init__(
        self, runner: ModelRunner, pool: BlockPool, block_size: int, chunk_tokens: int
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._ledger = CapacityLedger(pool, block_size, AdmissionRule(AdmissionMode.RESERVE))
        self._scheduler = CapacityScheduler(
            pool, self._ledger, _MAX_BATCH, chunk_tokens=chunk_tokens
        )
        self._sequences: dict[int, Sequence] = {}
        self._next = 0

    def add(self, prompt: list[int], max_tokens: int) -> int:
        """Greedy, to the last token; returns its number.

        Raises:
            NoRoomNowError: the pool has no room for it beside the others.
        """
        rows = len(prompt)
        [claim] = self._ledger.admit(Newcomer(rows, rows + max_tokens - 1, max_tokens))
        blocks, _ = self._ledger.bind(claim)
        sequence = Sequence(
            list(prompt),
            rows,
            SamplingParams.greedy_for(max_tokens, ignore_eos=True),
            frozenset(),
            lease=BlockLease(self._pool, blocks),
            claim=claim,
        )
        self._scheduler.add(sequence)
        number = self._next
        self._next += 1
        self._sequences[number] = sequence
        return number

    @torch.inference_mode()
    def step(self) -> list[tuple[int, list[int]]]:
        """One forward with its sampling: each request that has a new token.

        Raises:
            ValueError: nothing is under way, or the model's logits are broken.
        """
        step = self._scheduler.schedule(time.monotonic())
        if step is None:
            raise ValueError("nothing is under way")
        sampling = [part.sequence for part in step.parts if part.samples]
        logits = self._runner.forward(step)
        self._scheduler.commit(step)
        sampled = sample(logits, [SamplingRow.of(s) for s in sampling]) if sampling else []
        self._scheduler.settle(step)
        numbers = {sequence: number for number, sequence in self._sequences.items()}
        told: list[tuple[int, list[int]]] = []
        for sequence, token in zip(sampling, sampled, strict=True):
            if token is None:
                raise ValueError("the model gave no usable logits: NaN or infinite values")
            told.append((numbers[sequence], [token.token_id]))
            if sequence.append(token.token_id) is not None:
                self.cancel(numbers[sequence])
        return told

    def cancel(self, number: int) -> None:
        """Ends a request and frees its blocks; nothing where it has ended."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            assert sequence.lease is not None, "it was added with one"
            sequence.lease.release()
