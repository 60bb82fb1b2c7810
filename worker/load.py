"""The load report: one WorkerLoad from pool, engine and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos import common_pb2

if TYPE_CHECKING:
    from legato.worker.config import Role
    from legato.worker.engine_stats import EngineStats
    from legato.worker.handoff.transfer_counters import TransferCounters
    from legato.worker.kv.block_pool import PoolCounters, PoolUsage


def worker_load(
    role: Role,
    usage: PoolUsage,
    counters: PoolCounters,
    stats: EngineStats,
    transfers: TransferCounters,
    num_landing: int,
    swap: PoolUsage | None,
    *,
    now_s: float,
) -> common_pb2.WorkerLoad:
    """Gauges and counters; steps are of the worker's role, a colocated one's decode's, and prompt
    tokens are prefill's. `swap`: of the slots in the host's memory; None: there are none.
    `now_s`: of the engine's clock.
    """
    load = common_pb2.WorkerLoad(
        total_blocks=usage.total,
        free_blocks=usage.available,
        reserved_blocks=usage.reserved,
        held_blocks=usage.held,
        cached_blocks=usage.cached,
        prefix_blocks_asked=counters.prefix_blocks_asked,
        prefix_blocks_hit=counters.prefix_blocks_hit,
        prefix_blocks_evicted=counters.evictions,
        running=stats.running,
        waiting=stats.waiting,
        transferring=transfers.sending + num_landing,
        waiting_tokens=stats.waiting_tokens,
        model_s=stats.model_s,
        kv_bytes_sent=transfers.bytes_sent,
        kv_bytes_sent_by_memory=transfers.bytes_by_memory,
        kv_bytes_received=transfers.bytes_received,
        kv_transfers_completed=transfers.completed,
        kv_transfers_failed=transfers.failed,
        kv_chunks_refused=transfers.chunks_refused,
        swapped=stats.num_swapped,
        preemptions=stats.num_preemptions,
        preemptions_returned=stats.num_returned,
        swap_total_blocks=swap.total if swap is not None else 0,
        swap_held_blocks=swap.held if swap is not None else 0,
    )
    if role == "prefill":
        load.prefill_steps, load.prefill_tokens = stats.steps, stats.tokens
    else:
        here = stats.local_prefill
        load.decode_steps, load.decode_tokens = stats.steps, stats.tokens - here.num_tokens
        load.prefill_steps, load.prefill_tokens = here.num_steps, here.num_tokens
        load.local_prefill_token_s = here.token_s_at(now_s)
    return load
