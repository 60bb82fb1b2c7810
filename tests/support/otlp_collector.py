"""OtlpCollector: takes spans as a collector does, and keeps them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

FAILED = 2  # of a span's status


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as an async context manager."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []  # whose, and it

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802  # the proto's
        for resource in request.resource_spans:
            service = attributes_of(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, count: int, timeout_s: float = 20.0) -> None:
        """So many spans have come; the senders' batches leave every few seconds by themselves."""
        async with asyncio.timeout(timeout_s):
            while len(self.spans) < count:  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.02)

    def named(self, name: str, service: str | None = None) -> list[Span]:
        """By their beginnings."""
        found = [s for who, s in self.spans if s.name == name and service in (None, who)]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def children(self, parent: Span) -> list[str]:
        """Their names, by their beginnings."""
        own = [s for _, s in self.spans if s.parent_span_id == parent.span_id]
        return [s.name for s in sorted(own, key=lambda span: span.start_time_unix_nano)]

    def parent(self, child: Span) -> Span:
        """There must be one."""
        [found] = [s for _, s in self.spans if s.span_id == child.parent_span_id]
        return found

    def trace_ids(self) -> set[bytes]:
        """Of all spans."""
        return {span.trace_id for _, span in self.spans}


def attributes_of(owner: Any) -> Mapping[str, Any]:  # noqa: ANN401  # a span, event or resource
    """By name."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in owner.attributes}
