"""Credentials: the tokens that clients may show, as hashes, and whose; as new as their file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from legato.cluster.caller import ANYBODY, CALLER_ROLES, Caller
from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 512
MAX_TOKENS = 1024  # each is compared with, whatever the others say
MAX_FILE_BYTES = 1 << 20
LOOK_PERIOD_S = 1.0
LOG_PERIOD_S = 10.0
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what an Authorization header may carry
# `NAME ROLE: TOKEN`; no token has a colon.
_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64})(?:[ \t]+(?P<role>[a-z]+))?[ \t]*:(?P<token>.*)"
)
_HOW = "send `authorization: Bearer TOKEN` (legato: --token-file, or LEGATO_TOKEN)"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grant:
    """A line of a token file: what a token is, and who shows it."""

    token: str
    caller: Caller


def read_tokens(path: str) -> list[str]:
    """Those of `read_grants`."""
    return [grant.token for grant in read_grants(path)]


def read_grants(path: str) -> list[Grant]:
    """One a line; empty lines and those that begin with # are none. `NAME ROLE: TOKEN` names the
    tenant and what it may do, `client` where no role is said; a token alone is an admin's.

    Raises:
        ValueError: naming file and line, never what stands there.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"token file {path!r}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"token file {path!r} has more than {MAX_FILE_BYTES} bytes")
    grants: dict[str, Grant] = {}
    for number, raw in enumerate(data.split(b"\n"), start=1):
        token, caller = raw.decode("utf-8", "replace").strip(), ANYBODY
        if not token or token.startswith("#"):
            continue
        if (named := _NAMED.fullmatch(token)) is not None:
            role = next((r for r in CALLER_ROLES if r == (named["role"] or "client")), None)
            if role is None:
                raise ValueError(
                    f"token file {path!r}, line {number}: a role is {' or '.join(CALLER_ROLES)}"
                )
            token, caller = named["token"].strip(), Caller(named["name"], role)
        if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
            raise ValueError(
                f"token file {path!r}, line {number}: a token has {MIN_TOKEN_CHARS} to "
                f"{MAX_TOKEN_CHARS} letters, digits or ._~+/=-; `openssl rand -hex 32` makes one"
            )
        if grants.setdefault(token, Grant(token, caller)).caller != caller:
            raise ValueError(
                f"token file {path!r}, line {number}: another line has this token, with another "
                "name or role"
            )
    if len(grants) > MAX_TOKENS:
        raise ValueError(f"token file {path!r} has {len(grants)} tokens, limit {MAX_TOKENS}")
    return list(grants.values())


class Credentials:
    """Any thread may check. An emptied file refuses everybody; one that is wrong, or gone, leaves
    the tokens before it, and the log says so.
    """

    def __init__(self, path: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError where the file is wrong or has no token."""
        self._path = path
        self._now = now
        self._stamp = _stamp(path)
        self._callers = _hashed(read_grants(path))
        if not self._callers:
            raise ValueError(f"token file {path!r} has no token; `openssl rand -hex 32` makes one")
        self._looked_at_s = now()
        self._logged_at_s = -LOG_PERIOD_S
        self.num_refused = 0

    def check(self, header: str | None) -> Caller:
        """Whose an Authorization header is; as long for every token that is wrong.

        Raises:
            RequestError: UNAUTHENTICATED. It shows nothing of what came.
        """
        self._look()
        scheme, _, token = (header or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise self._refused("no token came with the call")
        shown = _hash(token[: MAX_TOKEN_CHARS + 1])
        found: list[Caller] = []
        for known, caller in self._callers:
            found += [caller] * hmac.compare_digest(known, shown)
        if not found:
            raise self._refused("the token that came with the call is none of this service's")
        return found[0]

    def _refused(self, reason: str) -> RequestError:
        self.num_refused += 1
        now_s = self._now()
        if now_s - self._logged_at_s >= LOG_PERIOD_S:  # a flood of them must not fill the log
            log.warning("calls refused for want of a token: %d", self.num_refused)
            self._logged_at_s = now_s
        return RequestError(grpc.StatusCode.UNAUTHENTICATED, f"{reason}: {_HOW}")

    def _look(self) -> None:
        now_s = self._now()
        if now_s - self._looked_at_s < LOOK_PERIOD_S:
            return
        self._looked_at_s = now_s
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            grants = read_grants(self._path)
        except ValueError as error:
            log.warning("%s; the tokens before it stay", error)
            return
        self._callers = _hashed(grants)
        log.info("tokens read anew: %d", len(grants))


def _hashed(grants: Sequence[Grant]) -> list[tuple[bytes, Caller]]:
    return [(_hash(grant.token), grant.caller) for grant in grants]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
