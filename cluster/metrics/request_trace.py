"""RequestTrace, CallSpan: one request's spans on the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.protos.tracing import fail, now_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span

    from legato.cluster.timings import Phase
    from legato.protos import generation_pb2
    from legato.protos.tracing import Tracing


class RequestTrace:
    """The request is one span. Its parts are the phases of each answer, one after the other, and
    each call to a worker, whose own spans are parts of that.
    """

    def __init__(self, tracing: Tracing, span: Span) -> None:
        """`span`: of the request, begun just now."""
        self._tracing = tracing
        self._span = span
        self._began_ns = now_ns()
        self._phases: dict[int, tuple[str, Span]] = {}  # by answer: the one that runs
        self._finish_reasons: list[str] = []
        self._num_output_tokens = 0

    @classmethod
    def begin(
        cls,
        tracing: Tracing,
        operation: str,
        model: str,
        request: generation_pb2.GenerateRequest,
        headers: Mapping[str, str],
    ) -> RequestTrace | None:
        """None: this one is not traced."""
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "legato",
            "gen_ai.request.model": model,
            "legato.request_id": request.request_id,
            "legato.answers": request.n or 1,
        }
        span = tracing.enter(f"{operation} {model}", headers, attributes)
        return None if span is None else cls(tracing, span)

    def begin_answer(self, index: int) -> None:
        """It waits in the queue, as the request did until now."""
        self._begin_phase(index, "queue", self._began_ns)

    def enter(self, index: int, phase: Phase) -> None:
        """The phase before is over."""
        name, running = self._phases[index]
        if phase.name.lower() != name:
            at_ns = now_ns()
            running.end(at_ns)
            self._begin_phase(index, phase.name.lower(), at_ns)

    def _begin_phase(self, index: int, name: str, start_ns: int) -> None:
        attributes = {"legato.answer": index}
        span = self._tracing.child(name, self._span, attributes, start_ns=start_ns)
        self._phases[index] = name, span

    def note(self, event: str, **fields: str | int) -> None:
        """Something happened to the request, or to its `answer`."""
        self._span.add_event(event, {f"legato.{name}": value for name, value in fields.items()})

    def call(self, service: str, method: str, worker_id: str) -> CallSpan:
        """A call to a worker begins."""
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": f"legato.v1.{service}",
            "rpc.method": method,
            "legato.worker": worker_id,
        }
        name = f"legato.v1.{service}/{method}"
        span = self._tracing.child(name, self._span, attributes, kind="client")
        return CallSpan(span, self._tracing.headers(span))

    def end_answer(self, index: int, finish: generation_pb2.Finish, reason: str) -> None:
        """By itself."""
        _, running = self._phases.pop(index)
        running.end()
        self._finish_reasons.append(reason)
        usage, timings = finish.usage, finish.timings
        self._num_output_tokens += usage.completion_tokens
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_output_tokens,
                "gen_ai.response.finish_reasons": self._finish_reasons,
                "legato.cached_prompt_tokens": usage.cached_prompt_tokens,
                "legato.attempts": timings.attempts,
                "legato.ttft_s": timings.ttft_s,
            }
        )

    def end(self, outcome: str, error_type: str) -> None:
        """The request is over, and what of it is not yet."""
        for _, running in self._phases.values():
            running.end()
        self._phases.clear()
        self._span.set_attribute("legato.outcome", outcome)
        if error_type:
            self._span.set_attribute("error.type", error_type)
        if outcome in ("failed", "refused"):
            fail(self._span, error_type)
        self._span.end()


class CallSpan:
    """One call to a worker, as the router sees it."""

    def __init__(self, span: Span, metadata: tuple[tuple[str, str], ...]) -> None:
        self._span = span
        self.metadata = metadata  # for the call: the worker's spans become parts of this one

    def fail(self, reason: str) -> None:
        """The worker ended it, or is lost."""
        fail(self._span, reason)

    def end(self) -> None:
        """Idempotent."""
        if self._span.is_recording():
            self._span.end()
