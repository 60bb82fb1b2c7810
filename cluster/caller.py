"""Caller: on whose behalf a call runs, as its token says; of the task that serves it."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

CallerRole = Literal["admin", "client"]
CALLER_ROLES: tuple[CallerRole, ...] = get_args(CallerRole)


@dataclass(frozen=True)
class Caller:
    """`tenant` is empty where the token has no name, or none is asked for."""

    tenant: str = ""
    role: CallerRole = "admin"

    def salt(self, cache_salt: str) -> str:
        """By which blocks of KV are found: a tenant's own for each salt that it gives. What a
        request gives is printable, and so is never the salt of another tenant.
        """
        if not self.tenant:
            return cache_salt
        text = f"{self.tenant}\x1f{cache_salt}"
        return "\x1f" + hashlib.sha256(text.encode()).hexdigest()


ANYBODY = Caller()
# Set where the token is checked, before anything else of the call runs.
CALLER: ContextVar[Caller] = ContextVar("CALLER", default=ANYBODY)
