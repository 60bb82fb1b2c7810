"""Tracing: spans to an OTLP collector, of routers and workers alike. The libraries are the extra
`otlp`, and are imported only where a collector is named.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    Attributes = Mapping[str, AttributeValue]
    Kind = Literal["server", "client", "internal"]

HEADERS = ("traceparent", "tracestate")  # of W3C, lower case as gRPC's metadata are
EXPORT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_MS = 3000
MISSING = "traces need OpenTelemetry: pip install 'legato[otlp]'"


def read_endpoint(text: str) -> str:
    """An OTLP collector's address as http:// or https:// and host:port.

    Raises:
        ValueError: it is none.
    """
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        is_whole = bool(url.hostname) and url.port is not None
    except ValueError:
        is_whole = False
    if url.scheme not in ("http", "https") or not is_whole or url.path.strip("/"):
        raise ValueError(
            f"must be host:port, http://host:port or https://host:port of a collector that takes "
            f"OTLP over gRPC, got {text!r}"
        )
    return f"{url.scheme}://{url.netloc}"


def check_installed() -> None:
    """Raises ValueError where the extra is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.sdk.trace  # noqa: F401  # whether it is there
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error


class Tracing:
    """Of one process. Spans leave in batches, from a thread of their own; what a collector that is
    away cannot take is dropped.
    """

    def __init__(self, endpoint: str, *, service: str, instance: str, share: float = 0.0) -> None:
        """`service`, `instance`: who tells. `share`: of the requests that come without a
        `traceparent`; those with one are traced where it says so.

        Raises:
            ValueError: no endpoint, or the libraries are missing.
        """
        endpoint = read_endpoint(endpoint)
        check_installed()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=endpoint.startswith("http://"),
            timeout=EXPORT_TIMEOUT_S,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("legato")
        self._propagator = TraceContextTextMapPropagator()
        self._in_context = set_span_in_context
        self._kinds = {
            "server": SpanKind.SERVER,
            "client": SpanKind.CLIENT,
            "internal": SpanKind.INTERNAL,
        }

    def enter(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span | None:
        """A call has come: a span in the caller's trace, if `headers` have one, or of a new trace.
        None: it is not traced.
        """
        context = self._propagator.extract({k: v for k, v in headers.items() if k in HEADERS})
        span = self._tracer.start_span(
            name, context, kind=self._kinds["server"], attributes=dict(attributes)
        )
        return span if span.is_recording() else None

    def child(
        self,
        name: str,
        parent: Span,
        attributes: Attributes,
        *,
        kind: Kind = "internal",
        start_ns: int | None = None,
    ) -> Span:
        """A part of `parent`, from now or from that Unix time on."""
        return self._tracer.start_span(
            name,
            self._in_context(parent),
            kind=self._kinds[kind],
            attributes=dict(attributes),
            start_time=start_ns,
        )

    def headers(self, span: Span) -> tuple[tuple[str, str], ...]:
        """For a call that is a part of `span`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._in_context(span))
        return tuple(carrier.items())

    def close(self) -> None:
        """Sends what is left, not for long. Blocks."""
        self._provider.force_flush(CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


def fail(span: Span, reason: str) -> None:
    """The span's work did not succeed."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, reason)


def now_ns() -> int:
    """As spans have it."""
    return time.time_ns()
