"""PoolView: the router's view of all pools: who is there, who fits together, who fell silent."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import grpc

from legato.cluster.cancellation import check_cancellation
from legato.cluster.identity_check import IdentityMismatchError, check_identity
from legato.cluster.kv_paths import KvPaths
from legato.cluster.learnt import Learnt
from legato.cluster.model_limits import ModelLimits
from legato.cluster.roles import PAIR, ROLES
from legato.cluster.worker_view import ViewState, WorkerView
from legato.protos import common_pb2, worker_pb2
from legato.protos.internal_access import ANYBODY, InternalAccess
from legato.protos.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from legato.cluster.control_plane import ControlPlane, Role, WorkerEndpoint

IDENTITY_TIMEOUT_S = 5.0
RETRY_S = 0.25
# Of the router itself: connections may have broken of it, after 2 s by `CHANNEL_OPTIONS`.
STOOD_STILL_S = 1.5
REPORT_TIMEOUT_S = 10.0  # of one try to tell the controller
# So many different requests in a row failed on a worker that still reports: it is broken.
FAILED_REQUESTS_LIMIT = 3

log = logging.getLogger(__name__)


class PoolView:
    """Keeps one WorkerView for each endpoint of the controller's snapshot, and watches it."""

    def __init__(
        self,
        control: ControlPlane,
        *,
        worker_silence_s: float,
        on_change: Callable[[], None],
        on_worker: Callable[[str, str, str], None] = lambda worker_id, state, reason: None,
        now: Callable[[], float] = time.monotonic,
        access: InternalAccess = ANYBODY,
    ) -> None:
        """`on_worker` hears of each change: the id, ready, draining, left, lost or gone, why."""
        self._control = control
        self._on_worker = on_worker
        self._access = access
        self._silence_s = worker_silence_s
        self._on_change = on_change
        self._now = now
        self.paths = KvPaths(now)
        self.learnt = Learnt(now)
        self._views: dict[str, WorkerView] = {}
        self._by_role: dict[Role, list[WorkerView]] = {role: [] for role in ROLES}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._last_tick_at = now()
        self._held_up_at = -float("inf")
        self.references: dict[Role, worker_pb2.WorkerIdentity] = {}  # of each pool, the first
        self.empty_since: dict[Role, float | None] = dict.fromkeys(ROLES, now())
        self.ever_ready = False
        self.seen_roles: set[Role] = set()
        self._limits: ModelLimits | None = None

    # --- who is there -------------------------------------------------------------------------

    def set_workers(self, workers: Sequence[WorkerEndpoint]) -> None:
        """Takes the controller's full snapshot; returns at once, connecting goes on behind."""
        wanted = {endpoint.worker_id: endpoint for endpoint in workers}
        self.seen_roles |= {endpoint.role for endpoint in workers}
        for worker_id in self._views.keys() - wanted.keys():
            self._watches.pop(worker_id).cancel()
            self.learnt.forget(worker_id)
            self._chore(self._views.pop(worker_id).close("it left the pool"))
            self._on_worker(worker_id, "gone", "it left the pool")
        for worker_id, endpoint in wanted.items():
            if worker_id in self._views:
                self._views[worker_id].endpoint = endpoint
                self._views[worker_id].note_departure()
            else:
                view = self._views[worker_id] = WorkerView(endpoint, self._access)
                self._watches[worker_id] = asyncio.create_task(self._watch(view))
        for role in ROLES:
            self._by_role[role] = [v for v in self._views.values() if v.endpoint.role == role]
        self.changed()

    def placeable(self, role: Role) -> list[WorkerView]:
        """Workers of the role that take new work."""
        return [view for view in self._by_role[role] if view.placeable]

    def view(self, worker_id: str) -> WorkerView | None:
        """The worker, if it is in the snapshot."""
        return self._views.get(worker_id)

    def views(self) -> list[WorkerView]:
        """All workers of the snapshot."""
        return list(self._views.values())

    @property
    def ready(self) -> bool:
        """True while a prefill and a decode worker take work, or a colocated one."""
        return self.short_since() is None

    def short_since(self) -> float | None:
        """Since when there is neither a pair nor a colocated worker; None: there is."""
        pair = [since for role in PAIR if (since := self.empty_since[role]) is not None]
        alone = self.empty_since["colocated"]
        return None if not pair or alone is None else max(min(pair), alone)

    def needed_roles(self) -> tuple[Role, ...]:
        """Those whose lack keeps a request waiting: a pair's, or where none ever was, colocated."""
        is_alone = "colocated" in self.seen_roles and not self.seen_roles.intersection(PAIR)
        return ("colocated",) if is_alone else PAIR

    def missing(self) -> str:
        """What is missing for `ready`, in words: of the kinds of worker that ever were here."""
        if self.ready:
            return "nothing"
        kinds: Sequence[Role] = PAIR
        if "colocated" in self.seen_roles:
            kinds = [role for role in ROLES if role in self.seen_roles]
        empty = [role for role in kinds if self.empty_since[role] is not None]
        return f"no ready worker in the {' and the '.join(empty)} pool"

    def limits(self) -> ModelLimits | None:
        """Of the largest workers now, else as last known; None before the first was ready."""
        views = [v for v in self._views.values() if v.state is ViewState.READY]
        identities = [v.identity for v in views if v.identity is not None]
        prefill, decode, alone = (
            max((v for v in views if v.endpoint.role == role), key=_capacity, default=None)
            for role in ROLES
        )
        # Of those that serve a request: two of a pair, or a colocated worker, which is both.
        ways = [way for way in ((prefill, decode), (alone, alone)) if None not in way]
        firsts, lasts = ([w for way in ways if (w := way[i]) is not None] for i in (0, 1))
        largest = max(lasts, key=_capacity, default=None)
        if largest is not None and largest.identity is not None:
            self._limits = ModelLimits(
                context_length=min(identity.context_length for identity in identities),
                vocab_size=identities[0].vocab_size,
                prefill_kv_tokens=max(view.capacity_tokens for view in firsts),
                decode_kv_tokens=largest.capacity_tokens,
                decode_block_size=largest.identity.kv_layout.block_size,
            )
        return self._limits

    @property
    def model_fingerprint(self) -> str:
        """The same of all workers; empty before the first told it."""
        return next((i.model_fingerprint for i in self.references.values()), "")

    def largest_prefill_kv_tokens(self) -> int:
        """Of the largest worker that computes prompts and takes work; else as last known."""
        views = [*self.placeable("prefill"), *self.placeable("colocated")]
        sizes = [view.capacity_tokens for view in views]
        if not sizes and (limits := self.limits()) is not None:
            return limits.prefill_kv_tokens
        return max(sizes, default=0)

    def changed(self) -> None:
        """Something that placement or health may depend on is different now."""
        for role in ROLES:
            if any(view.placeable for view in self._by_role[role]):
                self.empty_since[role] = None
            elif self.empty_since[role] is None:
                self.empty_since[role] = self._now()
        self.ever_ready = self.ever_ready or self.ready
        self._on_change()

    # --- who is lost --------------------------------------------------------------------------

    def lose(self, view: WorkerView, reason: str, *, tells: bool = True) -> None:
        """The worker hangs or is dead: its calls end; with `tells` the controller is told, once."""
        has_left = view.departing.is_set() and not view.is_busy
        if view.lose(reason):
            if has_left:
                log.info("worker %s left as asked (%s)", view.worker_id, reason)
            else:
                log.warning("worker %s lost: %s", view.worker_id, reason)
            self._on_worker(view.worker_id, "left" if has_left else "lost", reason)
            if tells:
                self._chore(self._report(view, reason))
            self.changed()

    def note_failure(self, view: WorkerView, request_id: str) -> None:
        """A call failed on a worker that may still be well: nothing new goes there until it
        reports. It may only have begun to drain; `_accept` judges.
        """
        view.full = True
        view.failed_requests.add(request_id)

    def check_silence(self) -> None:
        """Loses every worker that has not reported for too long. Called at least each 0.25 s.

        Where our own loop was held up, the reports may lie unread: that is no worker's silence.
        Where several are there and none of them has said anything of late, it is the machine's, or
        the network's: all are left out, and have a while to come back before somebody ends them.
        """
        now = self._now()
        held_up_s = max(0.0, now - self._last_tick_at - self._silence_s / 4)
        if self._is_held_up():
            self._held_up_at = now
        self._last_tick_at = now
        for view in self.views():
            view.last_report_at = min(now, view.last_report_at + held_up_s)
        ready = [view for view in self.views() if view.state is ViewState.READY]
        newest = max((view.last_report_at for view in ready), default=now)
        if len(ready) > 1 and now - newest > self._silence_s / 2:
            self._held_up_at = now
        for view in self.views():
            silent_s = now - view.last_report_at
            if view.state is ViewState.READY and silent_s > self._silence_s:
                self.lose(view, f"no report for {silent_s:.1f} s (limit {self._silence_s:g} s)")

    def _is_held_up(self) -> bool:
        """We have stood still since the last look; what waits in the loop may run before it."""
        return self._now() - self._last_tick_at > STOOD_STILL_S

    async def close(self) -> None:
        """Ends every watch and channel; waits for reports to the controller, bounded."""
        watches = list(self._watches.values())
        self.set_workers(())
        await asyncio.gather(*watches, return_exceptions=True)
        if self._chores:
            await asyncio.wait(self._chores, timeout=2.0)

    # --- watching one worker ------------------------------------------------------------------

    async def _watch(self, view: WorkerView) -> None:
        """Learns who the worker is, then follows its reports; connects again for as long as it is
        in the snapshot.

        A broken connection says as little of the worker as of this process: where it has stood
        still, all its connections break. The controller, which ends who is told to be lost, is told
        when connecting anew fails as well.
        """
        failing_since: float | None = None
        broke = ""  # why it is lost, and nobody was told yet
        while True:
            try:
                if view.identity is None:
                    await self._identify(view)
                async for report in view.control.WatchLoad(
                    worker_pb2.WatchLoadRequest(), metadata=view.metadata
                ):
                    failing_since, broke = None, ""
                    self._accept(view, report)
                reason = "its load reports ended"
            except grpc.aio.AioRpcError as error:
                details = printable(error.details() or "")
                reason = f"its load reports broke: {error.code().name} {details}"
            except asyncio.CancelledError:  # of the call, or of this task: see below
                reason = "its load reports were cancelled"
            except IdentityMismatchError as error:
                log.error("refused: %s", error)
                await view.close(str(error))
                await self._report(view, str(error))
                return
            check_cancellation()
            if view.state is ViewState.READY:
                self.lose(view, reason, tells=False)
                broke = reason
            elif broke and view.state is ViewState.LOST:
                self._chore(self._report(view, broke))
                broke = ""
            now = self._now()
            failing_since = failing_since if failing_since is not None else now
            if view.state is ViewState.CONNECTING and now - failing_since > IDENTITY_TIMEOUT_S:
                failing_since = now
                await self._try_to_report(
                    view, f"cannot connect to {view.endpoint.address}: {reason}"
                )
            await asyncio.sleep(RETRY_S)

    async def _identify(self, view: WorkerView) -> None:
        identity = await view.control.GetIdentity(
            worker_pb2.GetIdentityRequest(),
            timeout=IDENTITY_TIMEOUT_S,
            metadata=view.metadata,
        )
        check_identity(view.endpoint, identity, self.references)
        self.references.setdefault(view.endpoint.role, identity)
        view.identity = identity

    def _accept(self, view: WorkerView, report: worker_pb2.WorkerReport) -> None:
        if view.accept_report(report, self._now()):
            phase = common_pb2.WorkerPhase.Name(report.phase).lower()
            log.info("worker %s: %s", view.worker_id, phase)
            self._on_worker(view.worker_id, phase.removeprefix("worker_phase_"), "")
        self.learnt.note_report(view, report)
        if report.phase == common_pb2.WORKER_PHASE_DEAD:
            self.lose(view, "it reports that its engine is dead")
        elif (
            report.phase == common_pb2.WORKER_PHASE_READY
            and len(view.failed_requests) >= FAILED_REQUESTS_LIMIT
        ):
            self.lose(view, f"{len(view.failed_requests)} requests in a row failed")
            view.failed_requests.clear()
        self.changed()

    async def _report(self, view: WorkerView, reason: str) -> None:
        """Tells the controller, again and again while it restarts: without the report nobody would
        end a worker that hangs. Old news once the worker has left the snapshot.

        Where we stood still ourselves (stopped, or without a CPU), the worker has a while to report
        again: else a router that hangs would end all workers when it goes on.
        """
        if self._is_held_up() or self._now() - self._held_up_at < self._silence_s:
            deadline = self._now() + self._silence_s
            while view.state is ViewState.LOST and self._now() < deadline:  # noqa: ASYNC110  # bounded
                await asyncio.sleep(RETRY_S)
            if view.state is ViewState.READY:
                return
        while self._views.get(view.worker_id) is view:
            if await self._try_to_report(view, reason):
                return
            await asyncio.sleep(RETRY_S)

    async def _try_to_report(self, view: WorkerView, reason: str) -> bool:
        """True where the controller has taken note."""
        try:
            told = self._control.report_lost(view.worker_id, reason)
            await asyncio.wait_for(told, REPORT_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as error:
            log.warning("worker %s: not yet reported as lost: %s", view.worker_id, error)
            return False
        return True

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a chore of the pool view failed", exc_info=task.exception())


def _capacity(view: WorkerView) -> int:
    return view.capacity_tokens
