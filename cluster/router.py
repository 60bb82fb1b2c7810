"""Router: takes requests in, sees each through its life on the workers, and tells its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

import grpc

from legato.cluster.admission import Admission
from legato.cluster.answer_life import AnswerLife
from legato.cluster.counters import Counters
from legato.cluster.credentials import Credentials
from legato.cluster.deadline import Deadline
from legato.cluster.drain_clock import DrainClock
from legato.cluster.error_reasons import Reason
from legato.cluster.errors import ClientGoneError, RequestError, unavailable
from legato.cluster.gateway import Gateway
from legato.cluster.in_flight import InFlight, superseded
from legato.cluster.in_turn import InTurn
from legato.cluster.load_reporter import LoadReporter
from legato.cluster.metrics.history import History
from legato.cluster.metrics.meters import Meters
from legato.cluster.metrics.pool_poll import PoolPoll
from legato.cluster.metrics.request_record import RequestRecord, operation_of
from legato.cluster.metrics.request_trace import RequestTrace
from legato.cluster.pool_view import PoolView
from legato.cluster.prefill_costs import PrefillCostBook
from legato.cluster.prompt_hashes import PromptHashes
from legato.cluster.prompt_logprobs import PromptLogprobs
from legato.cluster.reader import Reader
from legato.cluster.request import parse_request
from legato.cluster.request_life import RequestLife, live
from legato.cluster.request_log import RequestLog
from legato.cluster.resumption import check_model
from legato.cluster.spoken_time import spoken_time
from legato.cluster.text.answer_text import AnswerText
from legato.cluster.timings import PhaseClock
from legato.cluster.unread_demand import unread_demand
from legato.protos import generation_pb2
from legato.protos.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from legato.cluster.answer import Answer
    from legato.cluster.answer_life import Send
    from legato.cluster.config import RouterOptions
    from legato.cluster.control_plane import ControlPlane, WorkerEndpoint
    from legato.cluster.http.server import HttpServer
    from legato.cluster.in_flight import Ownership
    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.reader import NewAnswer, Parse
    from legato.cluster.request import RequestSpec
    from legato.cluster.text.model_text import ModelText

CUT_SHORT_S = 1.0  # for requests that a drain cut short to tell their clients
TICK_S = 0.25  # between two looks at silence and at the queue, should no event have come

log = logging.getLogger(__name__)


class Router:
    """One service's data plane. All of it runs on one event loop; only reading has threads.

    `parse` and `new_answer` are the text side: a GenerateRequest to a RequestSpec, and a source
    of text for one answer. `started_at`: when the service began, on this machine's monotonic
    clock; None: with this router.
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
        started_at: float | None = None,
        parse: Parse = parse_request,
        new_answer: NewAnswer = AnswerText,
    ) -> None:
        self.options = options
        self.text = text
        self.control = control
        self.model_name = model_name
        self.version = version
        self.owner_pid = owner_pid
        self.owner_host = owner_host
        self.credentials = None if options.token_file is None else Credentials(options.token_file)
        self.counters = Counters()
        self.started_at = time.monotonic() if started_at is None else started_at
        self._log = RequestLog(options.request_log)
        self.meters = Meters()
        self.pool_poll = PoolPoll(control, is_autoscaled=options.reports_load)
        self.tracing: Tracing | None = None  # from `start` on, where it is asked for
        # Of the telemetry conventions, once it is bound: provider, models, address and port.
        self._service_labels: tuple[str, ...] = ("legato", model_name, model_name, "", "")
        self.pool = PoolView(
            control,
            worker_silence_s=options.worker_silence_s,
            access=options.access,
            on_change=self._on_change,
            on_worker=self._note_worker,
        )
        self._costs = PrefillCostBook()
        self.admission = Admission(options, self.pool, costs=self._costs.costs)
        self.history = History(self.meters, self.pool, self.admission)
        self._load_reporter: LoadReporter | None = None
        if options.reports_load:
            self._load_reporter = LoadReporter(control, self.admission, self.pool)
        self.reader = Reader(
            text,
            parse=parse,
            new_answer=new_answer,
            most_waiting=options.max_queued_requests,
            refusal=self.admission.refusal,
        )
        self._in_flight = InFlight()
        self._turn = asyncio.Lock()  # of those that have been read, to be taken into the queue
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._drain_clock = DrainClock()
        self._drained: asyncio.Task[int] | None = None
        self._end_told: asyncio.Event = asyncio.Event()
        self._num_cut = 0  # on all routers, once that is told
        self._gateway = Gateway(self)
        self._http: HttpServer | None = None
        self.grpc_port = 0  # once it is bound
        self._ticker: asyncio.Task[None] | None = None

    # --- the controller's side ----------------------------------------------------------------

    async def start(self) -> str:
        """Binds and serves; returns the address of the gRPC services as host:port.

        Raises:
            OSError: a port is taken, or the host is not this machine's.
            ValueError: `otlp_endpoint` is none, or what it needs is not installed.
        """
        if self.options.otlp_endpoint is not None:
            self.tracing = Tracing(
                self.options.otlp_endpoint,
                service="legato-router",
                instance=f"{socket.gethostname()}:{os.getpid()}",
                share=self.options.trace_share,
            )
        http = self._new_http()
        try:
            address = await self._gateway.start(self.options.host, self.options.port)
        except OSError:
            if http is not None:
                http.close()
            raise
        host, _, port = address.rpartition(":")
        self._service_labels = (*self._service_labels[:3], host.strip("[]"), port)
        self.grpc_port = int(port)
        if http is not None:
            await http.start()
            self._http = http
        self._ticker = asyncio.create_task(self._tick())
        self.pool_poll.start()
        self.history.start()
        if self._load_reporter is not None:
            self._load_reporter.start()
        return address

    @property
    def http_address(self) -> str:
        """host:port of the HTTP endpoint, while it serves; empty where there is none."""
        return "" if self._http is None else self._http.address

    def _new_http(self) -> HttpServer | None:
        """It has its port: taken before anything is served, so that a taken one leaves nothing."""
        if self.options.http_port is None:
            return None
        from legato.cluster.http.server import HttpServer  # late: it takes a moment

        return HttpServer(
            self,
            self.options.host,
            self.options.http_port,
            authorize=None if self.credentials is None else self.credentials.check,
            tls=self.options.tls,
        )

    async def set_workers(self, workers: Sequence[WorkerEndpoint]) -> None:
        """Takes the full snapshot of workers; idempotent."""
        self.pool.set_workers(workers)

    async def drain(self, timeout_s: float) -> int:
        """No new requests; running ones get `timeout_s`, then end UNAVAILABLE: how many did.

        Called again meanwhile, the newest time counts, and all calls return the same.
        """
        self._draining = True
        self._gateway.show_health(ready=False)
        self._drain_clock.give(timeout_s)
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain())
        return await asyncio.shield(self._drained)

    async def _drain(self) -> int:
        await self._drain_clock.over(self._idle)
        num_cut = len(self._running)
        for bound in tuple(self._running):
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CUT_SHORT_S)
        return num_cut

    @property
    def drain_left_s(self) -> float | None:
        """What running requests still have of a drain; None: there is none."""
        return self._drain_clock.left_s

    def tell_end(self, num_cut: int) -> None:
        """The drain is over on all routers, and so many requests were cut."""
        if not self._end_told.is_set():
            self._num_cut = num_cut
            self._end_told.set()

    async def end_told(self) -> int:
        """Returns when `tell_end` was called, or the router stops: how many requests were cut."""
        await self._end_told.wait()
        return self._num_cut

    async def stop(self) -> None:
        """Ends everything at once."""
        self.tell_end(await self.drain(0.0))
        if self._load_reporter is not None:
            await self._load_reporter.stop()
        await self.pool_poll.stop()
        await self.history.stop()
        await asyncio.gather(
            self._gateway.stop(), *([] if self._http is None else [self._http.stop()])
        )
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        await self.pool.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.reader.close()
        self._log.close()

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
        on_spec: Callable[[RequestSpec], None] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Serves one request; `send` gets every message, one at a time. Cancelling frees all that
        it holds. `on_spec` is told what was made of the request, before the first message.
        `headers`: the client's, or its call's metadata, names in lower case; by `traceparent` the
        request is part of the client's trace.

        Raises:
            RequestError: the status that the client gets.
            ClientGoneError: as `send` raised it.
        """
        trace = None
        if self.tracing is not None:
            trace = RequestTrace.begin(
                self.tracing, operation_of(request), self.model_name, request, headers or {}
            )
        with RequestRecord(self.meters, request, self._service_labels, trace) as record:
            await self._in_time(request, send, time_left_s, record, on_spec)

    @contextlib.contextmanager
    def reads(self, *, chat: bool) -> Iterator[None]:
        """What is refused within, of a request that is not read yet, is counted as `generate` does;
        `chat`: it is to be one.
        """
        try:
            yield
        except RequestError as error:
            self.counters.count_error(error)
            unread = generation_pb2.GenerateRequest()
            if chat:
                unread.messages.SetInParent()
            with RequestRecord(self.meters, unread, self._service_labels):
                raise

    async def _in_time(
        self,
        request: generation_pb2.GenerateRequest,
        send: Send,
        time_left_s: float | None,
        record: RequestRecord,
        on_spec: Callable[[RequestSpec], None] | None,
    ) -> None:
        clocks = [PhaseClock(time.monotonic)]  # one an answer, once their number is known
        limit_s = self.options.default_deadline_s if time_left_s is None else time_left_s
        deadline = Deadline(time.monotonic() + limit_s, given=time_left_s is not None)
        try:
            async with asyncio.timeout(limit_s) as bound:
                self._running.add(bound)
                self._idle.clear()
                try:
                    await self._generate(request, send, clocks, deadline, bound, record, on_spec)
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
            raise self._out_of_time(clocks, limit_s, deadline) from None
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
        bound: asyncio.Timeout,
        record: RequestRecord,
        on_spec: Callable[[RequestSpec], None] | None,
    ) -> None:
        spec, answers = await self._admit(request, deadline)
        if on_spec is not None:
            on_spec(spec)
        fingerprint = self.pool.model_fingerprint
        owner = await self._in_flight.take(spec, bound)
        try:
            clocks += [clocks[0].copy() for _ in spec.open_answers[1:]]
            start = generation_pb2.StreamStart(
                seed=spec.sampling.seed, max_tokens=spec.max_tokens, model_fingerprint=fingerprint
            )
            prompt = PromptLogprobs(spec.prompt_logprobs, len(spec.prompt_token_ids))
            told = InTurn(start, prompt, send)
            await self._live(spec, answers, prompt, told, clocks, deadline, owner, record)
        except asyncio.CancelledError:
            if owner.superseded and bound.expired():
                raise superseded(spec.request_id) from None
            raise
        finally:
            owner.release()

    async def _live(
        self,
        spec: RequestSpec,
        answers: Sequence[Answer],
        prompt_logprobs: PromptLogprobs,
        send: Send,
        clocks: Sequence[PhaseClock],
        deadline: Deadline,
        owner: Ownership,
        record: RequestRecord,
    ) -> None:
        async with self._turn:
            # One a round of the loop: of hundreds that come at once, each with many answers, the
            # first would be heard of, and health be asked for, only after the last is in.
            await asyncio.sleep(0)
        prompt = PromptHashes(spec.prompt_token_ids, spec.cache_salt)
        entries = self.admission.enter(len(spec.open_answers), deadline, prompt)
        window = None
        if self._load_reporter is not None and not spec.batch_priority:  # those have no goal
            window = self._load_reporter.window
        life = RequestLife(
            spec=spec,
            record=record,
            answers=[
                AnswerLife(
                    spec=spec,
                    index=index,
                    answer=answers[index],
                    entry=entry,
                    clock=clock,
                    send=send,
                    token_text=self.text.token_text,
                    log=self._log,
                    record=record.answer(index),
                    window=window,
                )
                for index, entry, clock in zip(spec.open_answers, entries, clocks, strict=True)
            ],
            admission=self.admission,
            pool=self.pool,
            costs=self._costs,
            prompt_logprobs=prompt_logprobs,
            local_prefill_tokens=self.options.local_prefill_tokens,
            max_attempts=self.options.max_attempts,
            seconds_left=lambda: max(0.001, deadline.at - time.monotonic()),
            on_end=owner.release,
        )
        self._log.note(
            "received",
            request=spec.request_id,
            answers=spec.num_answers,
            prompt_tokens=len(spec.prompt_token_ids),
        )
        outcome, reason = "completed", ""
        try:
            await live(life)
        except (asyncio.CancelledError, ClientGoneError):
            outcome = "deadline" if time.monotonic() >= deadline.at else "cancelled"
            outcome = "superseded" if owner.superseded else outcome
            raise
        except Exception as error:
            outcome, reason = "failed", str(error) or repr(error)
            raise
        finally:
            self._log.note("ended", request=spec.request_id, outcome=outcome, reason=reason)
            self.counters.moved += life.moves
            self.counters.moved_with_kv += life.kv_moves

    async def _admit(
        self, request: generation_pb2.GenerateRequest, deadline: Deadline
    ) -> tuple[RequestSpec, list[Answer]]:
        """Refuses what cannot be served now; validates and tokenises the rest in a thread."""
        if self._draining:
            raise unavailable("the service is shutting down", Reason.SHUTTING_DOWN)
        limits = self.pool.limits()
        if limits is None or not self.pool.ever_ready:
            raise unavailable(f"not ready: {self.missing()}")
        check_model(request, self.pool.model_fingerprint)
        least, most = unread_demand(request, limits)
        self.admission.check_arrival(least, most, deadline)
        return await self.reader.read(request, limits)

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest
    ) -> generation_pb2.TokenizeResponse:
        """What `generate` would make of the same text or messages. Raises RequestError."""
        return await self.reader.tokenize(request, self._known_limits())

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest
    ) -> generation_pb2.DetokenizeResponse:
        """As the text of an answer. Raises RequestError."""
        return await self.reader.detokenize(request, self._known_limits())

    def _known_limits(self) -> ModelLimits:
        limits = self.pool.limits()
        if limits is None:
            raise unavailable(f"no worker told its limits yet: {self.missing()}")
        return limits

    def _out_of_time(
        self, clocks: list[PhaseClock], limit_s: float, deadline: Deadline
    ) -> RequestError:
        if self._draining:
            return unavailable(
                "the service is shutting down; the request was cut short", Reason.SHUTTING_DOWN
            )
        if self.pool.ready:
            clock = next((c for c in clocks if not c.closed), clocks[0])
            phase = clock.phase.name.lower()
            return RequestError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"{deadline.name} of {spoken_time(limit_s)} passed in phase {phase}",
            )
        return unavailable(f"{spoken_time(limit_s)} passed without a worker: {self.missing()}")

    # --- state --------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True while requests are served."""
        return self.pool.ready and not self._draining

    def missing(self) -> str:
        """Why the service is not ready, in words."""
        return self.pool.missing()

    def _note_worker(self, worker_id: str, state: str, reason: str) -> None:
        self._log.note("worker", worker=worker_id, state=state, reason=reason)

    def _on_change(self) -> None:
        self.admission.wake()
        self._gateway.show_health(ready=self.ready)

    async def _tick(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.meters.loop_lag.of().add(max(0.0, time.monotonic() - due_s))
            self.pool.check_silence()
            self.admission.dispatch()
