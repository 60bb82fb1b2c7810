"""AutoscaleLoop: gathers what routers tell, asks the autoscaler, does what it decides."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from legato.cluster.autoscaler import Autoscaler
from legato.cluster.load_board import LoadBoard
from legato.cluster.role_change import RoleChangeRefusedError, UnknownWorkerError
from legato.cluster.roles import PAIR, WIRE_ROLES
from legato.cluster.scaling_decision import Flip
from legato.protos import cluster_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from legato.cluster.autoscale_options import AutoscaleOptions
    from legato.cluster.control_plane import Role
    from legato.cluster.pool_pressure import PoolSize
    from legato.cluster.router_load import RouterLoad
    from legato.cluster.scaling_decision import Decision

    ChangeRole = Callable[[str, Role], None]  # a worker id and its new role; moves both targets

PERIOD_S = 1.0
NUM_KEPT = 50  # decisions

log = logging.getLogger(__name__)


class ScaledPools(Protocol):
    """What it needs of the Controller."""

    def size_of(self, role: Role) -> PoolSize:
        """See Controller."""
        ...

    def ready_ids(self, role: Role) -> tuple[str, ...]:
        """See Controller."""
        ...

    def set_targets(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        """See Controller."""
        ...


class AutoscaleLoop:
    """Plain Python: the controller's actor hands in the time and the reports. Its state is built
    anew from nothing within the holds: a restart costs a delay, never a wrong step.
    """

    def __init__(
        self,
        options: AutoscaleOptions,
        pools: ScaledPools,
        now_s: float,
        change_role: ChangeRole | None = None,
    ) -> None:
        """Without `change_role` no worker's role is ever changed."""
        self._options = options
        self._pools = pools
        self._change_role = change_role
        self._board = LoadBoard()
        self._autoscaler = Autoscaler(options, now_s, can_flip=change_role is not None)
        self._decided: deque[tuple[float, str]] = deque(maxlen=NUM_KEPT)
        self._num_decided = 0
        self._next_s = now_s

    def note_load(self, load: RouterLoad, now_s: float) -> None:
        """A router tells its load."""
        self._board.note(load, now_s)

    def step(self, now_s: float) -> None:
        """To be called a few times a second; it looks once in PERIOD_S. While no router tells its
        load, nothing is judged.
        """
        if now_s < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        if not self._board.hears(now_s):
            return
        pools, board = self._pools, self._board
        decisions = self._autoscaler.step(
            board.prefill(pools.size_of("prefill"), pools.ready_ids("prefill"), now_s),
            board.decode(pools.size_of("decode"), pools.ready_ids("decode"), now_s),
            now_s,
        )
        for decision in decisions:
            self._carry_out(decision, now_s)

    def scale_by_hand(self, targets: Mapping[Role, int], now_s: float) -> dict[Role, int]:
        """Takes an operator's targets where they are in range; the cool-down of these pools begins.

        Raises:
            ValueError: naming the pool, the size and the range; then nothing is changed.
        """
        self._options.check_targets(targets)
        result = self._pools.set_targets(targets, now_s)
        for role in targets:
            self._autoscaler.note_order(role, now_s)
        return result

    def note_role_change(self, now_s: float) -> None:
        """An operator moved a worker between the pools: both are left alone for a while."""
        for role in PAIR:
            self._autoscaler.note_order(role, now_s)

    def status(self, now_s: float) -> cluster_pb2.AutoscalerStatus:
        """For operators."""
        options, needs = self._options, self._autoscaler.needs()
        pools = []
        for role in PAIR:
            allowed = options.range_of(role)
            pool = cluster_pb2.AutoscaledPool(
                role=WIRE_ROLES[role],
                min_workers=allowed.min_workers,
                max_workers=allowed.max_workers,
            )
            if need := needs.get(role):
                pool.needed, pool.reason = need.workers, need.reason
            pools.append(pool)
        return cluster_pb2.AutoscalerStatus(
            dry_run=options.dry_run,
            ttft_slo_s=options.ttft_slo_s,
            itl_slo_s=options.itl_slo_s,
            pools=pools,
            decisions=[
                cluster_pb2.ScalingDecision(age_s=now_s - at_s, text=text)
                for at_s, text in self._decided
            ],
            num_decisions=self._num_decided,
        )

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        text = f"dry run: {decision}" if self._options.dry_run else str(decision)
        self._note(text, now_s)
        if self._options.dry_run:
            return
        if isinstance(decision, Flip):
            assert self._change_role is not None, "flips are decided only where they can be done"
            try:
                self._change_role(decision.worker_id, decision.to)
            except (RoleChangeRefusedError, UnknownWorkerError) as error:
                self._note(f"{decision.worker_id} stays: {error}; a new worker starts", now_s)
                self._pools.set_targets({decision.to: decision.target}, now_s)
        else:
            self._pools.set_targets({decision.role: decision.after}, now_s)

    def _note(self, text: str, now_s: float) -> None:
        log.info("autoscale: %s", text)
        self._decided.append((now_s, text))
        self._num_decided += 1
