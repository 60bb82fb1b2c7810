"""WorkerView: what the router knows of one worker, and what it has given out of it."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from legato.cluster.policies import WorkerSnapshot
from legato.protos import common_pb2, worker_pb2_grpc
from legato.protos.internal_access import ANYBODY, InternalAccess

if TYPE_CHECKING:
    from legato.cluster.control_plane import WorkerEndpoint
    from legato.cluster.policies import Demand
    from legato.protos import worker_pb2

# A stopped process or a cut cable is noticed within keepalive time + timeout.
CHANNEL_OPTIONS = (
    # HTTP proxies of the environment are for the world outside, never between our processes.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    # This one decides how long a ping may stay unanswered; its default is a minute.
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A view is one process: its connection is never shared with another at the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# Answers that leave a worker at once: more would only share the way out, and each stands still
# meanwhile.
MOST_LEAVING = 4
DOUBT_S = 1.0  # after a refusal for want of room


class ViewState(Enum):
    """How far the router trusts a worker."""

    CONNECTING = "connecting"  # identity or first report still to come
    READY = "ready"
    LOST = "lost"  # hung, broken or dead; a fresh report makes it READY again
    CLOSED = "closed"  # no longer in the controller's snapshot, or refused


class Cancellable(Protocol):
    """A call to the worker."""

    def cancel(self) -> None:
        """The worker is lost."""


class PrefillShare:
    """One attempt's part of a prefill worker: blocks until hand-off, backlog until computed. Of a
    colocated worker only the backlog: there the blocks are the DecodeShare's.
    """

    def __init__(self, view: WorkerView, demand: Demand, num_uncached: int | None = None) -> None:
        """`num_uncached`: tokens that it will have to compute, as far as is known; None: all."""
        self._view = view
        self._tokens = demand.prefill_tokens if num_uncached is None else num_uncached
        snapshot = view.snapshot()
        self._blocks = snapshot.blocks_now(demand) if snapshot.role == "prefill" else 0
        view.used_blocks += self._blocks
        view.backlog_tokens += self._tokens
        view.note_use()

    @property
    def backlog_tokens(self) -> int:
        """This attempt's part of the worker's."""
        return self._tokens

    def computed(self) -> None:
        """The first token came: the prompt waits no more. Idempotent."""
        self._view.backlog_tokens -= self._tokens
        self._tokens = 0

    def release(self) -> None:
        """The worker holds nothing of the attempt any more. Idempotent."""
        self.computed()
        self._view.used_blocks -= self._blocks
        self._blocks = 0


class DecodeShare:
    """One attempt's part of a decode worker: the blocks that it takes to begin with, for as long
    as no report tells of them. From then on the worker's own count is the better one: prefixes are
    shared there, and what a slow client has yet to read holds nothing.
    """

    def __init__(self, view: WorkerView, demand: Demand) -> None:
        self._view = view
        self._blocks = view.snapshot().blocks_now(demand)
        view.used_blocks += self._blocks

    def granted(self) -> None:
        """The worker has promised them: its next report counts them."""
        self._view.granted.append(self)

    def release(self) -> None:
        """The worker holds nothing of the attempt any more, or has reported it. Idempotent."""
        self._view.used_blocks -= self._blocks
        self._blocks = 0


class WorkerView:
    """One worker process. Loses the router's trust at the first sign; wins it back by reporting.

    What the router has given out counts at once, which a report would say up to 50 ms later.
    `used_blocks` is all of it on prefill; on decode, where blocks are shared, grow and are swapped
    out, what the last report could not tell of. What other routers have given to a prefill worker
    is what its report says beyond the most that this router has had there since the one before: a
    report may be as old as that.

    The worker's own answer is the truth: what it has refused for want of room, and what asks for no
    less, is not tried again until its next report, and for a while only one by one, not by the
    whole queue at once.
    """

    def __init__(self, endpoint: WorkerEndpoint, access: InternalAccess = ANYBODY) -> None:
        self.endpoint = endpoint
        self.metadata = access.metadata  # of every call
        self.channel = access.channel(endpoint.address, CHANNEL_OPTIONS)
        self.prefill = worker_pb2_grpc.PrefillWorkerStub(self.channel)
        self.decode = worker_pb2_grpc.DecodeWorkerStub(self.channel)
        self.control = worker_pb2_grpc.WorkerControlStub(self.channel)
        self.state = ViewState.CONNECTING
        self.identity: worker_pb2.WorkerIdentity | None = None
        self.phase: common_pb2.WorkerPhase.ValueType = common_pb2.WORKER_PHASE_STARTING
        self.load: common_pb2.WorkerLoad | None = None
        self.last_report_at = 0.0
        self.lost_reason = ""
        self.used_blocks = 0
        self._most_used = (0, 0)  # blocks, backlog tokens since the last report
        self._others = (0, 0)  # blocks, backlog tokens of other routers' requests (prefill)
        self.granted: list[DecodeShare] = []  # since the last report
        self.backlog_tokens = 0
        self.full = False
        self._refused: list[Demand] = []
        self._doubtful: dict[Demand, float] = {}  # until when
        self._snapshot: WorkerSnapshot | None = None
        self._told_of: tuple[object, ...] = ()  # what it was made of
        self.calls: set[Cancellable] = set()
        # Requests that failed here since one last succeeded: different ones blame the worker.
        self.failed_requests: set[str] = set()
        self.departing = asyncio.Event()  # it drains: its answers may leave
        self.leaving = asyncio.Semaphore(MOST_LEAVING)
        self.move_s: float | None = None  # that the last of them stood still
        self.note_departure()

    @property
    def worker_id(self) -> str:
        """Unique for ever."""
        return self.endpoint.worker_id

    @property
    def placeable(self) -> bool:
        """True where new work may go."""
        return (
            self.state is ViewState.READY
            and not self.endpoint.draining
            and self.phase == common_pb2.WORKER_PHASE_READY
        )

    def note_departure(self) -> None:
        """To be called where its endpoint or its phase is another. There is no way back."""
        if self.endpoint.draining or self.phase == common_pb2.WORKER_PHASE_DRAINING:
            self.departing.set()

    @property
    def capacity_tokens(self) -> int:
        """Rows of KV of the whole worker; 0 before its identity is known."""
        if self.identity is None:
            return 0
        return self.identity.total_blocks * self.identity.kv_layout.block_size

    def snapshot(self) -> WorkerSnapshot:
        """For the policies. The identity must be known.

        The same one until something that it tells of is different: of hundreds of workers a request
        changes two, and all of them are looked at.
        """
        refused, doubtful = tuple(self._refused), tuple(self._doubtful)
        parts = (self.load, self.used_blocks, self.backlog_tokens, self._others, self.full)
        told_of = (*parts, refused, doubtful)
        if self._snapshot is None or self._told_of != told_of:
            self._snapshot, self._told_of = self._new_snapshot(refused, doubtful), told_of
        return self._snapshot

    def _new_snapshot(
        self, refused: tuple[Demand, ...], doubtful: tuple[Demand, ...]
    ) -> WorkerSnapshot:
        assert self.identity is not None, "a worker is placed on only after it said who it is"
        others_blocks, others_tokens = self._others
        free_blocks = self.identity.total_blocks - others_blocks
        if self.endpoint.role != "prefill" and self.load is not None:
            free_blocks = self.load.free_blocks
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=self.endpoint.role,
            block_size=self.identity.kv_layout.block_size,
            total_blocks=self.identity.total_blocks,
            free_blocks=free_blocks - self.used_blocks,
            backlog_tokens=self.backlog_tokens + others_tokens,
            local_token_s=self.load.local_prefill_token_s if self.load is not None else 0.0,
            full=self.full,
            refused=refused,
            doubtful=doubtful,
        )

    def note_refusal(self, demand: Demand) -> None:
        """The worker had no room for `demand`."""
        self._refused = self.snapshot().least_of((*self._refused, demand))

    def accept_report(self, report: worker_pb2.WorkerReport, now: float) -> bool:
        """Takes a load report; True where the state or the phase changed by it."""
        before = (self.state, self.phase)
        self.phase, self.load = report.phase, report.load
        self.note_departure()
        self.last_report_at = now
        self.full = False
        if self.endpoint.role == "prefill":
            self._note_others(report.load)
        for share in self.granted:
            share.release()
        self.granted.clear()
        if self._refused or self._doubtful:
            doubts = self._doubtful | dict.fromkeys(self._refused, now + DOUBT_S)
            least = self.snapshot().least_of(d for d, until in doubts.items() if now < until)
            self._doubtful = {demand: doubts[demand] for demand in least}
            self._refused.clear()
        if self.state is not ViewState.CLOSED:
            self.state = ViewState.READY
        return before != (self.state, self.phase)

    def note_use(self) -> None:
        """This router has given out more."""
        blocks, tokens = self._most_used
        self._most_used = max(blocks, self.used_blocks), max(tokens, self.backlog_tokens)

    def _note_others(self, load: common_pb2.WorkerLoad) -> None:
        blocks, tokens = self._most_used
        held = load.held_blocks + load.reserved_blocks
        self._others = max(0, held - blocks), max(0, load.waiting_tokens - tokens)
        self._most_used = self.used_blocks, self.backlog_tokens

    @property
    def is_busy(self) -> bool:
        """It has calls of ours, or said in its last report that it has work of somebody's."""
        load = self.load
        return bool(self.calls) or (load is not None and load.running + load.waiting > 0)

    def lose(self, reason: str) -> bool:
        """Ends all calls to the worker; True where it was trusted until now."""
        if self.state not in (ViewState.READY, ViewState.CONNECTING):
            return False
        was_ready = self.state is ViewState.READY
        self.state = ViewState.LOST
        self._end_calls(reason)
        return was_ready

    async def close(self, reason: str) -> None:
        """The worker is gone for good."""
        self.state = ViewState.CLOSED
        self._end_calls(reason)
        await self.channel.close()

    def _end_calls(self, reason: str) -> None:
        self.lost_reason = reason
        for call in tuple(self.calls):
            call.cancel()
