"""Target: a server under load, whatever it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.bench.load.sample import Sample
    from legato.bench.load.workload import LoadWorkload, Planned


@dataclass(frozen=True)
class Served:
    """What is known of a server once it was asked."""

    where: str
    model: str
    protocol: str  # "gRPC", or the path of the requests
    prompts: str  # "token ids" or "text"
    context_length: int | None  # tokens of prompt and answer; None where it does not say
    notes: tuple[str, ...] = ()  # what it would not do as asked


@dataclass(frozen=True)
class ServerTimes:
    """What a server says of its own times, by the names of Timings: a spread in seconds each (p50,
    p90, p99, max, mean and count; None where it does not say), and counts.
    """

    source: str | None  # in words; None: it says nothing
    spreads_s: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Target(Protocol):
    """Within `async with` it has been asked for its model, and has answered a short request.

    Several loads may use one at the same time.
    """

    async def __aenter__(self) -> Self:
        """Raises ServiceError or grpc.RpcError where there is no such server."""
        ...

    async def __aexit__(self, *_: object) -> None: ...

    @property
    def served(self) -> Served:
        """What is there."""
        ...

    def request(self, workload: LoadWorkload, planned: Planned) -> Any:  # noqa: ANN401
        """What `send` sends; made before it is due, so that making it costs no latency."""
        ...

    async def send(self, request: Any, sample: Sample, timeout_s: float) -> None:  # noqa: ANN401
        """Notes in the sample what comes, until it has ended, in whatever way."""
        ...

    async def server_times(self, samples: Sequence[Sample]) -> ServerTimes:
        """Of these requests where it says so of each; else of all it had since it was entered."""
        ...
