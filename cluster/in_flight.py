"""InFlight: who serves a request id at this router. Never two calls at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from legato.cluster.errors import RequestError, unavailable

if TYPE_CHECKING:
    from legato.cluster.request import RequestSpec

# For an older call to free what it holds, once it was told to end.
GIVE_WAY_TIMEOUT_S = 5.0


class Ownership:
    """One call's, of the id of its request, from `InFlight.take` to `release`."""

    def __init__(
        self,
        key: tuple[str, str],
        bound: asyncio.Timeout,
        owners: dict[tuple[str, str], Ownership],
    ) -> None:
        """`key`: tenant and request id."""
        self._key = key
        self.request_id = key[1]
        self._bound = bound
        self._owners = owners
        self._released = asyncio.Event()
        self.superseded = False  # a newer call resumes the stream

    def release(self) -> None:
        """Nothing is held for the request any more: its id may be used again. Idempotent."""
        if self._owners.get(self._key) is self:
            del self._owners[self._key]
        self._released.set()

    async def give_way(self) -> None:
        """Ends the call, as at its deadline; returns when it holds nothing.

        Raises:
            RequestError: UNAVAILABLE, it still holds something after a while.
        """
        self.superseded = True
        if not self._bound.expired():
            self._bound.reschedule(asyncio.get_running_loop().time())
        try:
            await asyncio.wait_for(self._released.wait(), GIVE_WAY_TIMEOUT_S)
        except TimeoutError:
            raise unavailable(
                f"the older call of request_id {self.request_id!r} has not ended within "
                f"{GIVE_WAY_TIMEOUT_S:g} s"
            ) from None


class InFlight:
    """By tenant and request id: nobody takes over, or ends, what is another's."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], Ownership] = {}

    def __contains__(self, request_id: str) -> bool:
        return any(found == request_id for _, found in self._owners)

    async def take(self, spec: RequestSpec, bound: asyncio.Timeout) -> Ownership:
        """The caller ends when `bound` does. A resumed stream takes the id from who has it.

        Raises:
            RequestError: ALREADY_EXISTS; UNAVAILABLE, as `Ownership.give_way`.
        """
        key = spec.tenant, spec.request_id
        while (older := self._owners.get(key)) is not None:
            if spec.resumed is None:
                raise RequestError(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"request_id {spec.request_id!r} is in flight; ids may be used again "
                    "afterwards",
                )
            await older.give_way()
        owner = self._owners[key] = Ownership(key, bound, self._owners)
        return owner


def superseded(request_id: str) -> RequestError:
    """What the older call ends with."""
    return RequestError(
        grpc.StatusCode.ABORTED,
        f"a newer call resumed the stream of request_id {request_id!r}",
    )
