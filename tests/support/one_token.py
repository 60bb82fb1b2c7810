"""one_token: what the HTTP endpoint asks for leave, where a single token is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from legato.cluster.caller import ANYBODY, Caller
from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


def one_token(token: str) -> Callable[[str | None], Caller]:
    """Takes an Authorization header."""

    def authorize(header: str | None) -> Caller:
        if header != f"Bearer {token}":
            raise RequestError(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")
        return ANYBODY

    return authorize
