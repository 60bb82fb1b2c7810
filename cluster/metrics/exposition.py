"""exposition: all of a router's metrics as a scraper reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from legato.cluster.metrics.catalogue import METRICS
from legato.cluster.metrics.state import state_families

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric as Family

    from legato.cluster.router import Router


class RouterCollector:
    """For prometheus_client: what was counted, then what is."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Family]:
        """In the catalogue's order."""
        families = {metric.name: tally.family() for metric, tally in self._router.meters.tallies()}
        families |= {family.name: family for family in state_families(self._router)}
        for metric in METRICS:
            yield families[metric.name]


def exposition(router: Router, accept: str | None = None) -> tuple[bytes, str]:
    """Body and content type: Prometheus' text, or OpenMetrics where `accept`, the request's header,
    asks for it. To be called on the router's event loop; it waits for nothing.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouterCollector(router))
    ProcessCollector(registry=registry)  # memory, processor time and files of this process
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
