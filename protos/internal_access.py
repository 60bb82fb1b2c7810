"""InternalAccess: by what routers and workers of one service know each other."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from legato.protos.tls_files import TlsFiles

# A certificate says what its owner may be by a DNS name of this kind: no public CA signs them.
ROUTER_NAME = "router.legato.internal"
WORKER_NAME = "worker.legato.internal"
SECRET_KEY = "legato-secret"


@dataclass(frozen=True)
class InternalAccess:
    """Certificates, a secret that the service's processes alone were told, both, or neither."""

    tls: TlsFiles | None = None  # with a CA; the router's at a router, the worker's at a worker
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls.ca_file is None:
            raise ValueError("TLS between the service's processes needs a CA")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For every call to a worker."""
        return ((SECRET_KEY, self.secret),) if self.secret else ()

    def channel(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """To a worker. With TLS it must be one by its certificate, wherever it listens."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", WORKER_NAME)]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=named)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listens for routers and workers; RuntimeError where it cannot."""
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.tls.server_credentials())

    def knows_secret(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call has it; compared in constant time."""
        if not self.secret:
            return True
        told = [value for key, value in metadata or () if key == SECRET_KEY]
        if len(told) != 1 or not isinstance(told[0], str):
            return False
        return hmac.compare_digest(told[0].encode(), self.secret.encode())


ANYBODY = InternalAccess()  # may call


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """The names in the certificate of who called."""
    names = auth_context.get("x509_subject_alternative_name", ())
    return frozenset(name.decode("utf-8", "replace") for name in names)
