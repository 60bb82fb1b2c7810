"""WorkerNode: one loaded model with its pool, engine, hand-off and services, wired together."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.protos import worker_pb2_grpc
from legato.text.guide_book import GuideBook
from legato.worker.engine import Engine
from legato.worker.handoff.receiver import KvReceiver
from legato.worker.handoff.room_notes import RoomNotes
from legato.worker.handoff.sender import KvSender
from legato.worker.handoff.shared_memory import SenderMemory
from legato.worker.handoff.tickets import TicketBook
from legato.worker.handoff.transfer_counters import TransferCounters
from legato.worker.identity import Identity
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.cache import KvCache
from legato.worker.kv.mover import KvMover
from legato.worker.kv.pager import KvPager
from legato.worker.kv.wire import WireFormat
from legato.worker.load import worker_load
from legato.worker.scheduling.capacity import CapacityLedger
from legato.worker.scheduling.capacity_decode import CapacityScheduler
from legato.worker.scheduling.claim import AdmissionMode, AdmissionRule
from legato.worker.scheduling.prefill import PrefillScheduler
from legato.worker.services.control import ControlService
from legato.worker.services.decode import DecodeService
from legato.worker.services.kv_transfer import KvTransferService
from legato.worker.services.prefill import PrefillService

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path

    import grpc

    from legato.protos import common_pb2
    from legato.protos.tracing import Tracing
    from legato.text.guide_vocabulary import GuideVocabulary
    from legato.worker.config import WorkerConfig
    from legato.worker.engine import SampleFunction
    from legato.worker.kv_budget import KvBudget
    from legato.worker.lifecycle import Lifecycle
    from legato.worker.loading import LoadedModel
    from legato.worker.scheduling.step import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerNode:
    """The parts that outlive a call."""

    identity: Identity
    lifecycle: Lifecycle
    pool: BlockPool
    host_pool: BlockPool | None  # slots for the KV of those that were preempted
    cache: KvCache
    engine: Engine
    tickets: TicketBook
    pager: KvPager
    sender: KvSender
    transfers: TransferCounters
    guides: GuideBook
    prefix_cache: bool
    shared_memory: bool  # whether KV may go that way

    @classmethod
    def build(
        cls,
        config: WorkerConfig,
        loaded: LoadedModel,
        budget: KvBudget,
        *,
        lifecycle: Lifecycle,
        sample: SampleFunction,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[BaseException], None],
    ) -> WorkerNode:
        """Allocates the pool and wires everything; starts nothing.

        Raises:
            ValueError: the context given does not fit the model.
        """
        model = loaded.model.config
        shape, num_blocks = budget.shape, budget.num_blocks
        _log.info("%s", budget.summary())
        if (warning := budget.warning()) is not None:
            _log.warning("%s", warning)
        pool = BlockPool(num_blocks)
        rule = AdmissionRule(AdmissionMode(config.admission), config.admission_risk)
        ledger = CapacityLedger(pool, config.block_size, rule)
        num_slots = budget.num_swap_slots
        host_pool = BlockPool(num_slots) if num_slots else None
        cache = KvCache(shape, num_blocks, loaded.device)
        scheduler: Scheduler
        mover = None
        if config.role == "prefill":
            scheduler = PrefillScheduler(pool, config.block_size, config.prefill_chunk_tokens)
        else:
            scheduler = CapacityScheduler(
                pool,
                ledger,
                config.max_batch_size,
                host_pool,
                mixes_prompts=loaded.device.type == "cpu",
                chunk_tokens=config.prefill_chunk_tokens if config.role == "colocated" else 0,
            )
            mover = KvMover(cache, num_slots)
        engine = Engine(
            model=loaded.model,
            cache=cache,
            scheduler=scheduler,
            sample=sample,
            device=loaded.device,
            max_batch_size=config.max_batch_size,
            loop=loop,
            on_failure=on_failure,
            counts_prompt_tokens=config.role == "prefill",
            mover=mover,
        )
        # Each knows of the other: the engine is told what the tickets give back.
        notes = RoomNotes(engine, lambda: tickets.wanted(), loop)
        tickets = TicketBook(pool, ledger, block_size=config.block_size, on_change=notes.tell)
        identity = Identity(
            worker_id=f"{config.role}-{uuid.uuid4().hex}",
            role=config.role,
            model_fingerprint=loaded.fingerprint,
            weights=loaded.weights,
            model=model,
            dtype=loaded.dtype,
            context_length=_context_length(config, model.context_length),
            kv_shape=shape,
            total_blocks=num_blocks,
        )
        pager = KvPager(cache, WireFormat.of(shape, config.kv_wire))
        transfers = TransferCounters()
        shared_memory = config.kv_lane == "auto"
        new_memory = SenderMemory.create if shared_memory else None
        return cls(
            identity=identity,
            lifecycle=lifecycle,
            pool=pool,
            host_pool=host_pool,
            cache=cache,
            engine=engine,
            tickets=tickets,
            pager=pager,
            sender=KvSender(
                identity, pager, pager.wire, transfers, new_memory, access=config.access
            ),
            transfers=transfers,
            guides=GuideBook(lambda: _vocabulary(loaded.source, model.vocab_size)),
            prefix_cache=config.prefix_cache,
            shared_memory=shared_memory,
        )

    def load(self) -> common_pb2.WorkerLoad:
        """As of now."""
        return worker_load(
            self.identity.role,
            self.pool.usage(),
            self.pool.counters(),
            self.engine.stats(),
            self.transfers,
            self.tickets.num_landing,
            None if self.host_pool is None else self.host_pool.usage(),
            now_s=time.monotonic(),
        )

    def add_services(
        self,
        server: grpc.aio.Server,
        begin_drain: Callable[[], None],
        tracing: Tracing | None = None,
    ) -> KvTransferService:
        """Registers all four; one that the role does not serve says so. Returns the one whose
        streams are to be waited for at the end.
        """
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(
            PrefillService(
                self.identity,
                self.lifecycle,
                self.engine,
                self.sender,
                self.guides,
                prefix_cache=self.prefix_cache,
                tracing=tracing,
            ),
            server,
        )
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(
            DecodeService(
                self.identity,
                self.lifecycle,
                self.engine,
                self.tickets,
                self.sender,
                self.guides,
                prefix_cache=self.prefix_cache,
                tracing=tracing,
            ),
            server,
        )
        receiver = KvReceiver(self.identity, self.tickets, self.pager, self.transfers)
        links = KvTransferService(self.identity.role, receiver, shared_memory=self.shared_memory)
        links.add_to(server)
        worker_pb2_grpc.add_WorkerControlServicer_to_server(
            ControlService(
                self.identity,
                self.lifecycle,
                self.load,
                begin_drain,
                kv_wire=self.pager.wire.name,
                pool=self.pool,
            ),
            server,
        )
        return links


def _vocabulary(source: Path, vocab_size: int) -> GuideVocabulary:
    # Here, because a worker without guides needs no tokenizer.
    from legato.text.guide_vocabulary import GuideVocabulary

    return GuideVocabulary.load(source, vocab_size)


def _context_length(config: WorkerConfig, model_limit: int) -> int:
    if config.context_length is None:
        return model_limit
    if config.context_length > model_limit:
        raise ValueError(
            f"context_length {config.context_length} exceeds the model's own {model_limit}"
        )
    return config.context_length
