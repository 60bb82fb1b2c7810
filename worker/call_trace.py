"""CallTrace: the spans of one call on a worker, where its router traces the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from legato.protos.tracing import HEADERS, Tracing, fail

if TYPE_CHECKING:
    from typing import Any

    import grpc
    from opentelemetry.trace import Span

    from legato.protos import worker_pb2


class CallTrace(Protocol):
    """What a call tells of itself."""

    def part(self, name: str, **fields: str | int | float) -> Part:
        """Begins a part of the call."""
        ...

    def note(self, event: str, **fields: str | int | float) -> None:
        """Something happened."""
        ...

    def fail(self, reason: str) -> None:
        """The call did not do what it was asked for."""
        ...

    def end(self) -> None:
        """The call is over, and every part of it."""
        ...


class Part(Protocol):
    """Of a call."""

    def end(self, error: str = "", **fields: str | int | float) -> None:
        """It is over; `error`: why it failed. The first call counts."""
        ...


class _Untold:
    """Nobody asked."""

    def part(self, name: str, **fields: str | int | float) -> Part:
        return self

    def note(self, event: str, **fields: str | int | float) -> None:
        pass

    def fail(self, reason: str) -> None:
        pass

    def end(self, error: str = "", **fields: str | int | float) -> None:
        pass


NOT_TRACED: CallTrace = _Untold()


class _Told:
    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._parts: list[_ToldPart] = []

    def part(self, name: str, **fields: str | int | float) -> Part:
        part = _ToldPart(self._tracing.child(name, self._span, _named(fields)))
        self._parts.append(part)
        return part

    def note(self, event: str, **fields: str | int | float) -> None:
        self._span.add_event(event, _named(fields))

    def fail(self, reason: str) -> None:
        fail(self._span, reason)

    def end(self) -> None:
        for part in self._parts:
            part.end()
        self._span.end()


class _ToldPart:
    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, error: str = "", **fields: str | int | float) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_named(fields))
            if error:
                fail(self._span, error)
            self._span.end()


def begin_call(
    tracing: Tracing | None,
    name: str,
    context: grpc.aio.ServicerContext[Any, Any],
    key: worker_pb2.AttemptKey,
) -> CallTrace:
    """Of the call that `context` is of; a worker begins no trace of its own."""
    if tracing is None:
        return NOT_TRACED
    metadata = context.invocation_metadata() or ()
    headers = {k: v for k, v in metadata if k in HEADERS and isinstance(v, str)}
    if "traceparent" not in headers:
        return NOT_TRACED
    fields = _named({"request_id": key.request_id, "attempt": key.attempt})
    span = tracing.enter(name, headers, fields)
    return NOT_TRACED if span is None else _Told(tracing, span)


def _named(fields: dict[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"legato.{name}": value for name, value in fields.items()}
