"""Router: takes requests in, sees each through its life on the workers, and tells its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from legato.cluster.admission import Admission
from legato.cluster.answer import Answer
from legato.cluster.answer_life import AnswerLife
from legato.cluster.errors import ClientGoneError, RequestError, unavailable
from legato.cluster.gateway import Gateway
from legato.cluster.pool_view import PoolView
from legato.cluster.prefill_costs import PrefillCostBook
from legato.cluster.prompt_hashes import PromptHashes
from legato.cluster.request import parse_request
from legato.cluster.request_life import RequestLife, live
from legato.cluster.text.answer_text import AnswerText
from legato.cluster.timings import PhaseClock
from legato.cluster.unread_demand import unread_demand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.cluster.answer import TextSource
    from legato.cluster.answer_life import Send
    from legato.cluster.config import RouterOptions
    from legato.cluster.control_plane import ControlPlane, WorkerEndpoint
    from legato.cluster.request import ModelLimits, RequestSpec
    from legato.cluster.text.model_text import ModelText
    from legato.protos import generation_pb2

# Tokenising a long text takes long: it must hold up neither the event loop nor a short one.
NUM_PARSE_THREADS = 4
CUT_SHORT_S = 1.0  # for requests that a drain cut short to tell their clients
TICK_S = 0.25  # between two looks at silence and at the queue, should no event have come

log = logging.getLogger(__name__)


DEFAULT_DEADLINE = "the service's default deadline"


@dataclass(frozen=True)
class Deadline:
    """Of a request, on the monotonic clock."""

    at: float
    name: str  # in words

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self.at - time.monotonic()


@dataclass
class Counters:
    """Requests since the start, by how they ended."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    moved: int = 0

    def count_error(self, error: RequestError) -> None:
        """Refused: the client's fault or a full house. Failed: ours."""
        if error.code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.ALREADY_EXISTS,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.FAILED_PRECONDITION,
        ):
            self.refused += 1
        else:
            self.failed += 1


class Router:
    """One service's data plane. All of it runs on one event loop; only parsing has threads.

    `parse` and `new_answer` are the text side: a GenerateRequest to a RequestSpec, and a source
    of text for one answer.
    """

    def __init__(
        self,
        options: RouterOptions,
        text: ModelText,
        control: ControlPlane,
        *,
        model_name: str,
        version: str,
        owner_pid: int,
        owner_host: str,
        parse: Callable[
            [generation_pb2.GenerateRequest, ModelText, ModelLimits], RequestSpec
        ] = parse_request,
        new_answer: Callable[[ModelText, Sequence[str], int], TextSource] = AnswerText,
    ) -> None:
        self.options = options
        self.text = text
        self.control = control
        self.model_name = model_name
        self.version = version
        self.owner_pid = owner_pid
        self.owner_host = owner_host
        self.counters = Counters()
        self.started_at = time.monotonic()
        self.pool = PoolView(
            control, worker_silence_s=options.worker_silence_s, on_change=self._on_change
        )
        self.admission = Admission(options, self.pool)
        self._costs = PrefillCostBook()
        self._parse = parse
        self._new_answer = new_answer
        self._parsers = ThreadPoolExecutor(NUM_PARSE_THREADS, thread_name_prefix="parse")
        self._num_parsing = 0
        self._in_flight: dict[str, RequestLife] = {}
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._gateway = Gateway(self)
        self._ticker: asyncio.Task[None] | None = None

    # --- the controller's side ----------------------------------------------------------------

    async def start(self) -> str:
        """Binds and serves; returns the address as host:port.

        Raises:
            OSError: the port is taken, or the host is not this machine's.
        """
        address = await self._gateway.start(self.options.host, self.options.port)
        self._ticker = asyncio.create_task(self._tick())
        return address

    async def set_workers(self, workers: Sequence[WorkerEndpoint]) -> None:
        """Takes the full snapshot of workers; idempotent."""
        self.pool.set_workers(workers)

    async def drain(self, timeout_s: float) -> None:
        """No new requests; running ones get `timeout_s`, then end with UNAVAILABLE."""
        self._draining = True
        self._gateway.show_health(ready=False)
        await self._wait_idle(timeout_s)
        for bound in tuple(self._running):
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time())
        await self._wait_idle(CUT_SHORT_S)

    async def stop(self) -> None:
        """Ends everything at once."""
        await self.drain(0.0)
        await self._gateway.stop()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        await self.pool.close()
        self._parsers.shutdown(wait=False, cancel_futures=True)

    async def _wait_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    # --- requests -----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Requests taken in and not ended, queued ones included."""
        return len(self._running)

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        send: Send,
        time_left_s: float | None,
    ) -> None:
        """Serves one request; `send` gets every message, one at a time. Cancelling frees all that
        it holds.

        Raises:
            RequestError: the status that the client gets.
            ClientGoneError: as `send` raised it.
        """
        clocks = [PhaseClock(time.monotonic)]  # one an answer, once their number is known
        limit_s = self.options.default_deadline_s if time_left_s is None else time_left_s
        try:
            async with asyncio.timeout(limit_s) as bound:
                self._running.add(bound)
                self._idle.clear()
                try:
                    deadline = (
                        "the call's deadline" if time_left_s is not None else DEFAULT_DEADLINE
                    )
                    until = Deadline(time.monotonic() + limit_s, deadline)
                    await self._generate(request, send, clocks, until)
                finally:
                    self._running.discard(bound)
                    if not self._running:
                        self._idle.set()
            self.counters.completed += 1
        except (asyncio.CancelledError, ClientGoneError):
            self.counters.cancelled += 1
            raise
        except TimeoutError:
            self.counters.failed += 1
            if not bound.expired():
                raise
            raise self._out_of_time(clocks, limit_s, given=time_left_s is not None) from None
        except RequestError as error:
            self.counters.count_error(error)
            raise
        except Exception:
            self.counters.failed += 1
            raise

    async def _generate(
        self,
        request: generation_pb2.GenerateRequest,
        send: Send,
        clocks: list[PhaseClock],
        deadline: Deadline,
    ) -> None:
        spec = await self._admit(request, deadline)
        if spec.request_id in self._in_flight:
            raise RequestError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request_id {spec.request_id!r} is in flight; ids may be used again afterwards",
            )
        clocks += [clocks[0].copy() for _ in range(1, spec.num_answers)]
        sending = asyncio.Lock()

        async def send_in_turn(response: generation_pb2.GenerateResponse) -> None:
            async with sending:  # gRPC takes one message of a call at a time
                await send(response)

        entries = self.admission.enter(
            spec.num_answers,
            deadline.at,
            deadline.name,
            PromptHashes(spec.prompt_token_ids, spec.cache_salt),
        )
        min_tokens = spec.sampling.min_tokens
        life = RequestLife(
            spec=spec,
            answers=[
                AnswerLife(
                    spec=spec,
                    index=index,
                    answer=Answer(spec, self._new_answer(self.text, spec.stop, min_tokens)),
                    entry=entry,
                    clock=clock,
                    send=send_in_turn,
                    token_text=self.text.token_text,
                )
                for index, (entry, clock) in enumerate(zip(entries, clocks, strict=True))
            ],
            admission=self.admission,
            pool=self.pool,
            costs=self._costs,
            local_prefill_tokens=self.options.local_prefill_tokens,
            max_attempts=self.options.max_attempts,
            seconds_left=lambda: max(0.001, deadline.left_s),
            on_end=lambda: self._forget(life),
        )
        self._in_flight[spec.request_id] = life
        try:
            await live(life)
        finally:
            self._forget(life)
            self.counters.moved += life.moves

    def _forget(self, life: RequestLife) -> None:
        """The id may be used again: by then it may be another's."""
        if self._in_flight.get(life.spec.request_id) is life:
            del self._in_flight[life.spec.request_id]

    async def _admit(
        self, request: generation_pb2.GenerateRequest, deadline: Deadline
    ) -> RequestSpec:
        """Refuses what cannot be served now; validates and tokenises the rest in a thread."""
        if self._draining:
            raise unavailable("the service is shutting down")
        limits = self.pool.limits()
        if limits is None or not self.pool.ever_ready:
            raise unavailable(f"not ready: {self.missing()}")
        least, most = unread_demand(request, limits)
        self.admission.check_arrival(least, most, deadline.left_s, deadline.name)
        limit = self.options.max_queued_requests
        if self._num_parsing > limit:
            raise self.admission.refusal(f"{self._num_parsing} requests are read (limit {limit})")
        self._num_parsing += 1  # until the thread is done, even if the client goes away
        parsing = self._parsers.submit(self._parse, request, self.text, limits)
        loop = asyncio.get_running_loop()
        parsing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._parsed))
        return await asyncio.wrap_future(parsing)

    def _parsed(self) -> None:
        self._num_parsing -= 1

    def _out_of_time(
        self, clocks: list[PhaseClock], limit_s: float, *, given: bool
    ) -> RequestError:
        if self._draining:
            return unavailable("the service is shutting down; the request was cut short")
        if self.pool.ready:
            clock = next((c for c in clocks if not c.closed), clocks[0])
            limit = "the call's deadline" if given else DEFAULT_DEADLINE
            return RequestError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"{limit} of {limit_s:.3g} s passed in phase {clock.phase.name.lower()}",
            )
        return unavailable(f"{limit_s:.3g} s passed without a worker: {self.missing()}")

    # --- state --------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True while requests are served."""
        return self.pool.ready and not self._draining

    def missing(self) -> str:
        """Why the service is not ready, in words."""
        pools = [role for role, since in self.pool.empty_since.items() if since is not None]
        return f"no ready worker in the {' and the '.join(pools)} pool" if pools else "nothing"

    def _on_change(self) -> None:
        self.admission.wake()
        self._gateway.show_health(ready=self.ready)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.pool.check_silence()
            self.admission.dispatch()
