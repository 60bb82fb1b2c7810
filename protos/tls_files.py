"""TlsFiles: a certificate, its key and whom it trusts, by their paths, as gRPC wants them."""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

Stamp = tuple[tuple[int, int, int], ...]
Pems = tuple[bytes, bytes, bytes | None]  # certificate, key, CA

# As last read: in the moment in which a file is replaced there may be none.
_last_read: dict[TlsFiles, Pems] = {}


@dataclass(frozen=True)
class TlsFiles:
    """Paths on the machine where they are used: keys never leave it. All are PEM."""

    cert_file: str  # and the chain behind it
    key_file: str
    ca_file: str | None = None  # who signs the other side's; None: a server asks for none

    def check(self) -> None:
        """Raises ValueError naming the file that is missing or wrong, or the key of another."""
        named = {"certificate": self.cert_file, "key": self.key_file, "CA": self.ca_file}
        for what, file in named.items():
            if file is None:
                continue
            try:
                Path(file).read_bytes()
            except OSError as error:
                raise ValueError(f"TLS {what} {file!r}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password it would ask the terminal for one.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"TLS certificate {self.cert_file!r} and key {self.key_file!r} do not fit each "
                f"other, or are no PEM without a password: {error}"
            ) from error
        if self.ca_file is not None:
            try:
                context.load_verify_locations(self.ca_file)
            except ssl.SSLError as error:
                raise ValueError(f"TLS CA {self.ca_file!r} is no PEM: {error}") from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """With a CA: clients must have a certificate of it. New files count for new connections;
        where they are wrong those before go on.
        """
        source = CertificateSource(self)
        return grpc.dynamic_ssl_server_credentials(
            source.load(),
            source.if_new,  # type: ignore[arg-type]  # the stub forgot that None means: as before
            require_client_authentication=self.ca_file is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """To dial with; the files as they are now, for as long as the channel lives."""
        try:
            _last_read[self] = self.read()
        except OSError:
            if self not in _last_read:
                raise
        cert, key, ca = _last_read[self]
        return grpc.ssl_channel_credentials(ca, key, cert)

    def read(self) -> Pems:
        """The files' contents."""
        ca = None if self.ca_file is None else Path(self.ca_file).read_bytes()
        return Path(self.cert_file).read_bytes(), Path(self.key_file).read_bytes(), ca

    def stamp(self) -> Stamp:
        """Another one where a file is another."""
        files = filter(None, (self.cert_file, self.key_file, self.ca_file))
        stats = [os.stat(file) for file in files]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


class CertificateSource:
    """What gRPC asks at every new connection, from threads of its own."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp: Stamp = ()

    def load(self) -> grpc.ServerCertificateConfiguration:
        """As the files are now; OSError where one cannot be read."""
        self._stamp = self._files.stamp()
        cert, key, ca = self._files.read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def if_new(self) -> grpc.ServerCertificateConfiguration | None:
        """None: what was loaded last is to stay."""
        with self._lock:
            try:
                if self._files.stamp() == self._stamp:
                    return None
                self._files.check()
                return self.load()
            except (OSError, ValueError):  # half of them replaced: asked again at the next one
                return None
