"""ClientAccess: what a client shows, and whom it trusts: token, certificates."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import grpc

from legato.cluster.metadata_channel import MetadataChannel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Options = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class ClientTls:
    """Paths of PEM files. All unset: TLS with the authorities that this machine trusts."""

    ca_file: str | None = None  # who signed the service's certificate
    cert_file: str | None = None  # the client's own, where the service wants one
    key_file: str | None = None
    server_name: str | None = None  # in the service's certificate, where the address is another

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ValueError naming the file that is missing or wrong, or the key of another."""
        self.ssl_context()  # gRPC takes anything, and then no connection comes about
        ca, key, cert = map(_read, (self.ca_file, self.key_file, self.cert_file))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def ssl_context(self) -> ssl.SSLContext:
        """For HTTP; ValueError as `credentials`."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client's TLS certificate and its key go together")
        for path in (self.ca_file, self.cert_file, self.key_file):
            _read(path)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise ValueError(
                f"TLS CA {self.ca_file!r} holds no certificate in PEM form{_holds(self.ca_file)}"
            ) from error
        if self.cert_file is not None:
            self._load_own(context)
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        assert self.cert_file is not None, "asked where there is one"
        try:
            # Without a password it would ask the terminal for one.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (ssl.SSLError, ValueError) as error:
            both = f"TLS certificate {self.cert_file!r} and key {self.key_file!r}"
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                raise ValueError(f"{both} do not fit each other") from error
            for path, word in ((self.cert_file, b"CERTIFICATE"), (self.key_file, b"PRIVATE KEY")):
                if not _has_pem(path, word):
                    raise ValueError(
                        f"TLS file {path!r} holds no {word.decode().lower()} in PEM form"
                        f"{_holds(path)}"
                    ) from error
            raise ValueError(
                f"{both} do not fit each other, or are no PEM without a password: {error}"
            ) from error


@dataclass(frozen=True)
class ClientAccess:
    """By default nothing is shown, and nothing asked of the service."""

    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    # Over a connection that others may read on.
    allow_plain_token: bool = False

    @classmethod
    def from_environment(cls, given: Mapping[str, str] = os.environ) -> ClientAccess:
        """LEGATO_TOKEN or LEGATO_TOKEN_FILE; LEGATO_CLIENT_TLS=1, LEGATO_CLIENT_TLS_CA, _CERT,
        _KEY, _SERVER_NAME; LEGATO_CLIENT_ALLOW_PLAIN_TOKEN=1.

        Raises:
            ValueError: the token's file is wrong.
        """
        token = given.get("LEGATO_TOKEN") or None
        if token is None and (path := given.get("LEGATO_TOKEN_FILE")):
            try:
                token = read_token(path)
            except ValueError as error:
                raise ValueError(f"LEGATO_TOKEN_FILE: {error}") from None
        names = ("CA", "CERT", "KEY", "SERVER_NAME")
        files = [given.get(f"LEGATO_CLIENT_TLS_{name}") or None for name in names]
        wants_tls = any(files) or given.get("LEGATO_CLIENT_TLS") == "1"
        return cls(
            token=token,
            tls=ClientTls(*files) if wants_tls else None,
            allow_plain_token=given.get("LEGATO_CLIENT_ALLOW_PLAIN_TOKEN") == "1",
        )

    def check(self, targets: Sequence[str]) -> None:
        """Raises ValueError where the token is none, or would go to another machine in plain."""
        if self.token is None:
            return
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise ValueError("the token has characters that no token has")
        for target in targets:
            if self.tls is None and not self.allow_plain_token and not is_loopback(target):
                raise ValueError(
                    f"the token is not sent to {target} in plain, where others may read it: use "
                    "TLS (--tls-ca, LEGATO_CLIENT_TLS_CA), or allow it with --allow-plain-token or "
                    "LEGATO_CLIENT_ALLOW_PLAIN_TOKEN=1"
                )

    def check_urls(self, urls: Sequence[str]) -> None:
        """As `check`, of http:// and https://."""
        parts = [urlsplit(url) for url in urls]
        plain = [f"[{part.hostname}]:{part.port or 80}" for part in parts if part.scheme == "http"]
        replace(self, tls=None).check(plain)

    def channel(self, target: str, options: Options) -> grpc.Channel:
        """To a router; the files as they are now. ValueError as `check` and `ClientTls` have it."""
        self.check([target])
        if self.tls is None:
            channel = grpc.insecure_channel(target, options=options)
        else:
            named = self._named(options)
            channel = grpc.secure_channel(target, self.tls.credentials(), options=named)
        return cast("grpc.Channel", self._bearing(channel))

    def aio_channel(self, target: str, options: Options) -> grpc.aio.Channel:
        """As `channel`."""
        self.check([target])
        if self.tls is None:
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            named = self._named(options)
            channel = grpc.aio.secure_channel(target, self.tls.credentials(), options=named)
        return cast("grpc.aio.Channel", self._bearing(channel))

    def _named(self, options: Options) -> Sequence[tuple[str, Any]]:
        assert self.tls is not None, "asked with TLS alone"
        name = self.tls.server_name
        return options if name is None else [*options, ("grpc.ssl_target_name_override", name)]

    def _bearing(self, channel: object) -> object:
        if self.token is None:
            return channel
        return MetadataChannel(channel, (("authorization", f"Bearer {self.token}"),))


NOTHING_SHOWN = ClientAccess()


def choose_access(
    access: ClientAccess | None, token: str | None, targets: Sequence[str]
) -> ClientAccess:
    """What a client was given, else what the environment says.

    Raises:
        ValueError: it cannot be, or not with these targets.
    """
    chosen = access if access is not None else ClientAccess.from_environment()
    if token is not None:
        chosen = replace(chosen, token=token)
    chosen.check(targets)
    if chosen.tls is not None:
        chosen.tls.credentials()  # now, rather than in the middle of a call
    return chosen


def read_token(path: str) -> str:
    """The first of a file as `--api-token-file` has it.

    Raises:
        ValueError: it cannot be read, or has none.
    """
    from legato.cluster.credentials import read_tokens

    tokens = read_tokens(path)
    if not tokens:
        raise ValueError(f"token file {path!r} has no token")
    return tokens[0]


def is_loopback(target: str) -> bool:
    """Whether host:port is this machine's own, by its text alone."""
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_pem(path: str | None, word: bytes) -> bool:
    """`word`: the end of what stands between BEGIN and the dashes."""
    return re.search(rb"-----BEGIN [A-Z ]*" + word + rb"-----", _read(path) or b"") is not None


def _holds(path: str | None) -> str:
    """What it has in the place of what was looked for, where that can be said."""
    if _has_pem(path, b"PRIVATE KEY"):
        return ", but a private key"
    return ", but a certificate" if _has_pem(path, b"CERTIFICATE") else ""


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"TLS file {path!r}: {error.strerror}") from error
