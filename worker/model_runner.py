"""ModelRunner: runs the model on a step, by the quickest way that its device has."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from legato.kernels import native
from legato.worker.arena import Arena
from legato.worker.batch import build_batch
from legato.worker.decode_inputs import DecodeInputs
from legato.worker.forward import new_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from legato.worker.forward import Empty, ForwardBatch, Model
    from legato.worker.kv.cache import KvCache
    from legato.worker.scheduling.step import Step
    from legato.worker.unread import UnreadTokens

# Recorded decode steps that are kept, by batch size; the least recently used one goes first.
_MAX_PROGRAMS = 32


@dataclass(frozen=True)
class _Recorded:
    program: native.Program
    logits: Tensor
    generation: int  # of the arena whose memory it uses


class ModelRunner:
    """On a CPU with compiled kernels every pass is recorded first and then run in one call. A
    decode step is recorded once a batch size and run again with new inputs.

    The logits are valid until the next step.
    """

    def __init__(
        self, model: Model, cache: KvCache, device: torch.device, max_batch_size: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._arena = Arena()
        self._inputs = DecodeInputs(
            max_batch_size, model.config.context_length, cache.shape.block_size
        )
        self._programs: OrderedDict[int, _Recorded] = OrderedDict()

    def forward(self, step: Step, unread: UnreadTokens | None = None) -> Tensor:
        """Logits [R, vocab_size] fp32 of the step's sampling parts, in order.

        `unread` holds the tokens of the step before that have not come back from the device.
        On CUDA the work is only queued when this returns.
        """
        if not self._model.recordable:
            return self._model.forward(self._batch(step, unread, new_tensor), self._cache)
        assert unread is None, "the CPU knows every token when a step returns"
        one_each = all(part.num_tokens == 1 and part.samples for part in step.parts)
        if one_each and len(step.parts) <= self._inputs.capacity:
            return self._decode(step)
        self._arena.reset()
        batch = self._batch(step, None, self._arena.empty)
        with native.record() as program:
            logits = self._model.forward(batch, self._cache)
        program.run(torch.get_num_threads())
        return logits

    def _batch(self, step: Step, unread: UnreadTokens | None, empty: Empty) -> ForwardBatch:
        size = self._cache.shape.block_size
        return build_batch(step, size, self._device, unread=unread, empty=empty)

    def _decode(self, step: Step) -> Tensor:
        self._inputs.fill(step.parts)
        num_sequences = len(step.parts)
        recorded = self._programs.get(num_sequences)
        if recorded is None or recorded.generation != self._arena.generation:
            recorded = self._record(num_sequences)
        self._programs.move_to_end(num_sequences)
        recorded.program.run(torch.get_num_threads())
        return recorded.logits

    def _record(self, num_sequences: int) -> _Recorded:
        self._arena.reset()
        batch = self._inputs.batch(num_sequences, self._arena.empty)
        with native.record() as program:
            logits = self._model.forward(batch, self._cache)
        recorded = _Recorded(program, logits, self._arena.generation)
        self._programs[num_sequences] = recorded
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return recorded

    def wait(self) -> None:
        """Until the device has computed all that was queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
