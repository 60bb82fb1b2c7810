"""MetadataChannel: a gRPC channel, blocking or of asyncio, whose every call carries something."""

from __future__ import annotations

from typing import Any


class MetadataChannel:
    """gRPC's own call credentials are refused without TLS, on loopback too; its interceptors put
    themselves between the messages of each stream. This costs nothing but a call.
    """

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:  # noqa: ANN401  # of either kind
        self._channel = channel
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever a channel has
        attribute = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return attribute

        def with_metadata(*args: Any, **settings: Any) -> Any:  # noqa: ANN401  # as the channel's
            return _Call(attribute(*args, **settings), self._metadata)

        return with_metadata

    def __enter__(self) -> MetadataChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> MetadataChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


class _Call:
    """One method of a service; a blocking one has `future` and `with_call` besides."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:  # noqa: ANN401  # as above
        self._method = method
        self._metadata = metadata

    def __call__(self, *args: Any, metadata: Any = (), **settings: Any) -> Any:  # noqa: ANN401  # as the method's
        return self._method(*args, metadata=(*(metadata or ()), *self._metadata), **settings)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # another way to make the call
        return _Call(getattr(self._method, name), self._metadata)
