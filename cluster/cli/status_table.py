"""What `legato status` prints: a service, its pools, and each worker's sequences and KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from legato.protos import cluster_pb2, common_pb2

DECISIONS_SHOWN = 5


def status_lines(answer: cluster_pb2.GetStatusResponse) -> list[str]:
    """The service, its queue, and what each pool says."""
    router = answer.router
    lines = [
        f"{answer.model}: {'ready' if answer.ready else 'NOT READY'}, up {answer.uptime_s:.0f} s, "
        f"legato {answer.version}, owner {answer.owner_pid} on {answer.owner_host}",
        f"requests: {router.queued} queued, {router.in_flight} in flight, {router.completed} "
        f"completed, {router.failed} failed, {router.cancelled} cancelled, {router.refused} "
        f"refused, {router.moved} moved after a loss, {router.moved_with_kv} with their KV",
    ]
    for pool in answer.pools:
        if not pool.target and not pool.workers and not pool.message and len(answer.pools) > 2:
            continue  # there is a colocated pool, and this one is not wanted
        text = pool.message or f"{pool.ready} of {pool.target} ready"
        asked = sum(worker.load.prefix_blocks_asked for worker in pool.workers)
        hit = sum(worker.load.prefix_blocks_hit for worker in pool.workers)
        if asked:
            text += f"; prefix hits: {prefix_hits(asked, hit)} blocks"
        lines.append(f"{role_name(pool.role)}: {text}")
    if answer.HasField("autoscaler"):
        lines += autoscaler_lines(answer.autoscaler)
    return lines


def autoscaler_lines(status: cluster_pb2.AutoscalerStatus) -> list[str]:
    """Ranges, goals, what each pool needs now, and the last decisions; --json has all of them."""
    ranges = ", ".join(
        f"{role_name(p.role)} {p.min_workers}..{p.max_workers}" for p in status.pools
    )
    lines = [
        f"autoscaler{' (dry run)' * status.dry_run}: {ranges}; goals: "
        f"TTFT {status.ttft_slo_s * 1000:g} ms, ITL {status.itl_slo_s * 1000:g} ms"
    ]
    lines += [
        f"  {role_name(pool.role)} needs {pool.needed}: {pool.reason}"
        for pool in status.pools
        if pool.needed
    ]
    lines += [
        f"  {decision.age_s:,.0f} s ago: {decision.text}"
        for decision in status.decisions[-DECISIONS_SHOWN:]
    ]
    return lines


def worker_table(answer: cluster_pb2.GetStatusResponse) -> Table:
    """One line a worker: who it is, and its sequences."""
    table = _table(
        ("worker", "state", "address", "pid"),
        ("running", "waiting", "swapped", "preempted", "tokens"),
    )
    for pool in answer.pools:
        for worker in pool.workers:
            load = worker.load
            table.add_row(
                short_id(worker.worker_id),
                _phase(worker.phase),
                worker.address,
                str(worker.pid or ""),
                f"{load.running:,}",
                f"{load.waiting:,}",
                f"{load.swapped:,}",
                preemptions(load),
                f"{load.prefill_tokens + load.decode_tokens:,}",
            )
    return table


def kv_table(answer: cluster_pb2.GetStatusResponse) -> Table:
    """One line a worker: its KV blocks. free + cached + held = total; a promise names no block, and
    is kept with free or cached ones.
    """
    table = _table(
        ("KV blocks of",),
        ("free", "cached", "held", "total", "promised", "in host memory", "prefix hits"),
    )
    for pool in answer.pools:
        for worker in pool.workers:
            load = worker.load
            table.add_row(
                short_id(worker.worker_id),
                f"{load.free_blocks + load.reserved_blocks - load.cached_blocks:,}",
                f"{load.cached_blocks:,}",
                f"{load.held_blocks:,}",
                f"{load.total_blocks:,}",
                f"{load.reserved_blocks:,}",
                f"{load.swap_held_blocks:,} of {load.swap_total_blocks:,}",
                prefix_hits(load.prefix_blocks_asked, load.prefix_blocks_hit),
            )
    return table


def preemptions(load: common_pb2.WorkerLoad) -> str:
    """How many, and how many of them left the worker, to be computed anew elsewhere."""
    if not load.preemptions_returned:
        return f"{load.preemptions:,}"
    return f"{load.preemptions:,} ({load.preemptions_returned:,} returned)"


def prefix_hits(asked: int, hit: int) -> str:
    """The share of the full blocks that prompts asked for; a dash where none has asked."""
    return f"{100 * hit / asked:.0f} % of {asked:,}" if asked else "-"


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", overflow="fold")
    return table


def short_id(worker_id: str) -> str:
    """Role and the first eight digits: enough to tell workers apart; --json has all of it."""
    role, _, digits = worker_id.partition("-")
    return f"{role}-{digits[:8]}" if digits else worker_id


def role_name(role: int) -> str:
    """`prefill`, `decode` or `colocated`."""
    from legato.protos import common_pb2

    return common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()  # type: ignore[arg-type]  # enum values are ints at run time


def _phase(phase: int) -> str:
    from legato.protos import common_pb2

    return common_pb2.WorkerPhase.Name(phase).removeprefix("WORKER_PHASE_").lower()  # type: ignore[arg-type]  # as above
