"""What `legato status` prints: a service, its pools, and each worker's sequences and KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from legato.protos import cluster_pb2, common_pb2

DECISIONS_SHOWN = 5


def status_lines(
    answer: cluster_pb2.GetStatusResponse,
    routers: Mapping[str, cluster_pb2.RouterStatus | None],
) -> list[str]:
    """The service, what each router says of its own requests, by its address (None: it does not
    answer), and what each pool says.
    """
    lines = [
        f"{answer.model}: {'ready' if answer.ready else 'NOT READY'}, up {answer.uptime_s:.0f} s, "
        f"legato {answer.version}, owner {answer.owner_pid} on {answer.owner_host}"
    ]
    lines += [f"requests at {address}: {_requests(told)}" for address, told in routers.items()]
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


def _requests(router: cluster_pb2.RouterStatus | None) -> str:
    if router is None:
        return "no answer from this router"
    return (
        f"{router.queued} queued, {router.in_flight} in flight, {router.completed} completed, "
        f"{router.failed} failed, {router.cancelled} cancelled, {router.refused} refused, "
        f"{router.moved} moved after a loss, {router.moved_with_kv} with their KV"
    )


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
    table = table_of(
        ("worker", "state", "address", "pid"),
        ("running", "waiting", "swapped", "preempted", "tokens"),
    )
    for pool in answer.pools:
        for worker in pool.workers:
            load = worker.load
            table.add_row(
                short_id(worker.worker_id),
                phase_name(worker.phase),
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
    """One line a worker: its KV blocks, and what it has sent by which lane."""
    table = table_of(
        ("KV blocks of",),
        ("free", "cached", "held", "total", "promised", "in host memory", "prefix hits", "sent"),
    )
    for pool in answer.pools:
        for worker in pool.workers:
            load = worker.load
            table.add_row(
                short_id(worker.worker_id),
                *(f"{count:,}" for count in kv_blocks(load).values()),
                f"{load.swap_held_blocks:,} of {load.swap_total_blocks:,}",
                prefix_hits(load.prefix_blocks_asked, load.prefix_blocks_hit),
                kv_sent(load),
            )
    return table


def kv_blocks(load: common_pb2.WorkerLoad) -> dict[str, int]:
    """free + cached + held = total; a promise names none of them: free or cached ones keep it."""
    return {
        "free": load.free_blocks + load.reserved_blocks - load.cached_blocks,
        "cached": load.cached_blocks,
        "held": load.held_blocks,
        "total": load.total_blocks,
        "promised": load.reserved_blocks,
    }


def status_dict(answer: cluster_pb2.GetStatusResponse) -> dict[str, Any]:
    """The answer's fields; of KV blocks what the table has, under the same names."""
    from legato.cluster.cli.json_form import json_dict

    told = json_dict(answer)
    for pool, shown_pool in zip(answer.pools, told["pools"], strict=True):
        for worker, shown in zip(pool.workers, shown_pool["workers"], strict=True):
            # These count what is free otherwise, and would stand beside the table's.
            for field in ("total", "free", "reserved", "held", "cached"):
                shown.get("load", {}).pop(f"{field}_blocks", None)
            shown["kv_blocks"] = kv_blocks(worker.load)
    return told


def kv_sent(load: common_pb2.WorkerLoad) -> str:
    """How much KV this worker has sent, and by which lane."""
    if not load.kv_bytes_sent:
        return "-"
    by_memory = load.kv_bytes_sent_by_memory / load.kv_bytes_sent
    if by_memory in (0, 1):
        lane = "shared memory" if by_memory else "gRPC"
    else:
        lane = f"{100 * by_memory:.0f} % by shared memory"
    return f"{size_words(load.kv_bytes_sent)}, {lane}"


def size_words(num_bytes: float) -> str:
    """For people: 512 B, 4.2 MB, 17 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def preemptions(load: common_pb2.WorkerLoad) -> str:
    """How many, and how many of them left the worker, to be computed anew elsewhere."""
    if not load.preemptions_returned:
        return f"{load.preemptions:,}"
    return f"{load.preemptions:,} ({load.preemptions_returned:,} returned)"


def prefix_hits(asked: int, hit: int) -> str:
    """The share of the full blocks that prompts asked for; a dash where none has asked."""
    return f"{100 * hit / asked:.0f} % of {asked:,}" if asked else "-"


def table_of(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """Empty, with these columns to the left and to the right."""
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


def phase_name(phase: int) -> str:
    """`ready`, `draining`, …."""
    from legato.protos import common_pb2

    return common_pb2.WorkerPhase.Name(phase).removeprefix("WORKER_PHASE_").lower()  # type: ignore[arg-type]  # as above
