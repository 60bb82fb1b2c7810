"""parse_addresses: where the routers of a service listen, as its clients name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Each host:port of "a:1,b:2", or of a list of such texts, once.

    Raises:
        ValueError: naming what is no host:port, or that there is none at all.
    """
    texts = [addresses] if isinstance(addresses, str) else addresses
    targets = [word.strip() for text in texts for word in text.split(",")]
    for target in targets:
        host, _, port = target.rpartition(":")
        is_open_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not host or is_open_ipv6 or not _is_port(port):
            raise ValueError(
                f"address is {target!r}, limit host:port with a port in [1, 65535], several with "
                "commas between them (an IPv6 host in brackets)"
            )
    if not targets:
        raise ValueError("address names no router, limit at least 1")
    return tuple(dict.fromkeys(targets))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535
