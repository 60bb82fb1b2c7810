"""exposition: all of a router's metrics as a scraper reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from legato.cluster.metrics.catalogue import METRICS
from legato.cluster.metrics.state import state_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric as Family

    from legato.cluster.router import Router


class _Families:
    """For prometheus_client, which asks for them once."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        """In the catalogue's order."""
        yield from self._families


def families(router: Router) -> list[Family]:
    """What was counted and what is, at this moment; to be called on the router's event loop."""
    told = {metric.name: tally.family() for metric, tally in router.meters.tallies()}
    told |= {family.name: family for family in state_families(router)}
    return [told[metric.name] for metric in METRICS]


def written(families: Sequence[Family], accept: str | None = None) -> tuple[bytes, str]:
    """Body and content type: Prometheus' text, or OpenMetrics where `accept`, the request's header,
    asks for it. May be called in any thread: it takes most of the time.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    ProcessCollector(registry=registry)  # memory, processor time and files of this process
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type


def exposition(router: Router, accept: str | None = None) -> tuple[bytes, str]:
    """Both; waits for nothing."""
    return written(families(router), accept)
