"""lean_ray: Ray's parts that a service of its own has no use for, left out of its start."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray._private.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def lean_ray() -> Iterator[None]:
    """Within the block, a Ray that starts is one without the autoscaler's monitor, the monitor that
    brings logs to the driver (nothing of either is switched on), and the dashboard's server, which
    Ray starts and waits for although it was told to include none. They take a third of the start.
    Where this Ray has other names for them, it starts them all.
    """

    def no_dashboard(node: Any, **_: object) -> None:  # noqa: ANN401  # Ray's own class
        node._webui_url = ""

    parts = {
        "start_monitor": _nothing,
        "start_log_monitor": _nothing,
        "start_api_server": no_dashboard,
    }
    whole = {name: getattr(Node, name, None) for name in parts}
    if not all(map(callable, whole.values())):
        yield
        return
    for name, instead in parts.items():
        setattr(Node, name, instead)
    try:
        yield
    finally:
        for name, method in whole.items():
            setattr(Node, name, method)


def _nothing(_: object) -> None:
    """In the place of what is left out."""
