"""ModelRunner: runs the model on a step, by the quickest way that its device has."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from legato.worker.arena import Arena
from legato.worker.batch import build_batch
from legato.worker.capture import CpuProgram, CudaGraph
from legato.worker.decode_inputs import DecodeInputs
from legato.worker.forward import new_tensor
from legato.worker.kv.block_pool import blocks_for
from legato.worker.logits import Logits

if TYPE_CHECKING:
    from legato.worker.capture import Captured
    from legato.worker.forward import Empty, ForwardBatch, Model
    from legato.worker.kv.cache import KvCache
    from legato.worker.layer_reports import LayerReports
    from legato.worker.scheduling.step import Step
    from legato.worker.unread import UnreadTokens

# Captured decode steps that are kept; the least recently used one goes first.
_MAX_CAPTURED = 64


class ModelRunner:
    """Decode steps are captured and run again with new inputs: on a CPU with compiled kernels for
    each batch size, on CUDA for buckets of batch size and context, filled up with spare rows.
    Other passes on such a CPU are captured as well, for one run: it is a single call.

    What a step computes is valid until the next one.
    """

    def __init__(
        self, model: Model, cache: KvCache, device: torch.device, max_batch_size: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._arena = Arena()
        self._captured: OrderedDict[tuple[int, int], Captured] = OrderedDict()
        self._inputs: DecodeInputs | None = None
        self._graph_pool: Any = None  # torch keeps the handle's type to itself
        if model.recordable:
            self._inputs = DecodeInputs(
                max_batch_size,
                # A pool smaller than the context bounds a sequence too.
                min(
                    blocks_for(model.config.context_length, cache.shape.block_size),
                    cache.num_blocks,
                ),
                cache.shape.block_size,
                cache.spare_block,
                device,
            )
            if device.type == "cuda":
                self._graph_pool = torch.cuda.graph_pool_handle()

    def forward(
        self,
        step: Step,
        unread: UnreadTokens | None = None,
        reports: LayerReports | None = None,
    ) -> Logits:
        """Those of the step's sampling parts, in order.

        `unread` holds the tokens of the step before that have not come back from the device.
        `reports` is told how far the pass has come, but for a captured one: of one token each.
        On CUDA the work is only queued when this returns.
        """
        inputs = self._inputs
        if inputs is not None and len(step.parts) <= inputs.capacity and _one_token_each(step):
            return self._decode(inputs, step, unread)
        if self._model.recordable and self._device.type == "cpu":
            self._reset_arena()
            batch = self._batch(step, unread, reports, self._arena.empty)
            captured = CpuProgram(lambda: self._model.forward(batch, self._cache))
            captured.replay()
            return Logits(captured.logits, captured.best, batch.scores)
        batch = self._batch(step, unread, reports, new_tensor)
        return Logits(self._model.forward(batch, self._cache), scores=batch.scores)

    def wait(self) -> None:
        """Until the device has computed all that was queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _batch(
        self, step: Step, unread: UnreadTokens | None, reports: LayerReports | None, empty: Empty
    ) -> ForwardBatch:
        size = self._cache.shape.block_size
        return build_batch(step, size, self._device, unread=unread, reports=reports, empty=empty)

    def _decode(self, inputs: DecodeInputs, step: Step, unread: UnreadTokens | None) -> Logits:
        count = len(step.parts)
        num_rows, max_blocks = (
            count,
            blocks_for(self._model.config.context_length, self._cache.shape.block_size),
        )
        if self._graph_pool is not None:
            longest = max(part.sequence.num_computed for part in step.parts) + 1
            num_rows = min(_row_bucket(count), inputs.capacity)
            max_blocks = _power_of_two(blocks_for(longest, self._cache.shape.block_size), 64)
        inputs.fill(step.parts, num_rows, unread)
        key = (num_rows, max_blocks)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._capture(inputs, num_rows, max_blocks)
        self._captured.move_to_end(key)
        captured.replay()
        return Logits(captured.logits[:count], captured.best[:count])

    def _reset_arena(self) -> None:
        generation = self._arena.generation
        self._arena.reset()
        if self._arena.generation != generation:
            self._captured.clear()  # they are stale, and hold the old memory

    def _capture(self, inputs: DecodeInputs, num_rows: int, max_blocks: int) -> Captured:
        captured: Captured
        if self._graph_pool is None:
            self._reset_arena()
            batch = inputs.batch(num_rows, max_blocks, self._arena.empty)
            captured = CpuProgram(lambda: self._model.forward(batch, self._cache))
        else:
            batch = inputs.batch(num_rows, max_blocks, new_tensor)
            captured = CudaGraph(lambda: self._model.forward(batch, self._cache), self._graph_pool)
        self._captured[num_rows, max_blocks] = captured
        if len(self._captured) > _MAX_CAPTURED:
            self._captured.popitem(last=False)
        return captured


def _one_token_each(step: Step) -> bool:
    return all(part.num_tokens == 1 and part.samples for part in step.parts)


def _row_bucket(count: int) -> int:
    """1, 2, 4, 8, then multiples of 8: at most 7 rows are computed for nothing."""
    return _power_of_two(count, 1) if count <= 8 else -(-count // 8) * 8


def _power_of_two(count: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
