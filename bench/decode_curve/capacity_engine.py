"""CapacityEngine: one model and a decode pool on one thread, with the product's admission rules."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from legato.bench.decode_curve.capacity_run import CapacityRun
from legato.bench.loaded_cost import loaded_cost
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.kv.mover import KvMover
from legato.worker.loading import load_model
from legato.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from legato.bench.decode_curve.capacity_run import Progress, RunRecord
    from legato.bench.decode_curve.trace import Request
    from legato.worker.config import WorkerConfig
    from legato.worker.scheduling.claim import AdmissionRule


class CapacityEngine:
    """Runs traces one after the other, each with an empty pool at its start."""

    def __init__(self, config: WorkerConfig, num_slots: int | None = None) -> None:
        """Loads the model and allocates the pool. `num_slots`: blocks that the host's memory has
        room for; None: as many as the pool has.

        Raises:
            ValueError: it, or its fit with the config, is wrong.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config)
        shape = KvShape.of(loaded.model.config, config, loaded.dtype)
        self.model, self.dtype, self.device = loaded.model, loaded.dtype, loaded.device
        self.source, self.weights = loaded.source, loaded.weights
        # What the CPU multiplies: quantised weights ("int8+bfloat16") meet activations of 8 bits.
        quantized = "+" in loaded.weights and self.device.type == "cpu"
        self.product_dtype = "int8" if quantized else str(self.dtype).removeprefix("torch.")
        self.cache = KvCache(shape, shape.num_blocks(config.kv_memory_bytes), loaded.device)
        self.num_slots = self.cache.num_blocks if num_slots is None else num_slots
        self.mover = KvMover(self.cache, self.num_slots)
        self.runner = ModelRunner(loaded.model, self.cache, loaded.device, config.max_batch_size)
        self.cost = loaded_cost(self.model, shape.bytes_per_token)
        self.max_batch_size = config.max_batch_size
        self.chunk_tokens = config.prefill_chunk_tokens

    def with_blocks(self, num_blocks: int) -> CapacityEngine:
        """The same model over a pool of its own, of zeros and of another size; it cannot swap."""
        other = copy.copy(self)
        other.cache = KvCache(self.cache.shape, num_blocks, self.device)
        other.num_slots = 0
        other.mover = KvMover(other.cache, 0)
        other.runner = ModelRunner(self.model, other.cache, self.device, self.max_batch_size)
        return other

    @torch.inference_mode()
    def run(
        self,
        requests: SequenceOf[Request],
        rule: AdmissionRule,
        *,
        num_at_once: int | None = None,
        num_steps: int | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> RunRecord:
        """Answers the requests, which are all there at the start.

        `num_at_once`: no more are under way or waiting for room; when one ends, the next one is
        sent. `num_steps`: after so many decode steps whatever is left is cancelled.

        Raises:
            ValueError: a request can never fit the pool or the model's context, or its logits are
                broken.
        """
        return CapacityRun(self, requests, rule, num_at_once, num_steps, on_step).run()
