"""KvTransferService: the Push call, one transfer into one ticket's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from legato.worker.services.errors import reports_errors, wrong_role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from legato.worker.config import Role
    from legato.worker.handoff.receiver import KvReceiver

    Context = grpc.aio.ServicerContext[Any, Any]

_LAST = (kv_transfer_pb2.KvAck.STATUS_REFUSED, kv_transfer_pb2.KvAck.STATUS_COMMITTED)


class KvTransferService(kv_transfer_pb2_grpc.KvTransferServicer):
    """A draining worker still receives: its open tickets are running work."""

    def __init__(self, role: Role, new_receiver: Callable[[], KvReceiver]) -> None:
        self._role = role
        self._new_receiver = new_receiver

    @reports_errors
    async def Push(  # type: ignore[override]  # noqa: N802  # the stub knows generators only; the name is the RPC's
        self, request_iterator: AsyncIterator[kv_transfer_pb2.KvPush], context: Context
    ) -> None:
        """Answers every message until the transfer is committed, refused or cut off."""
        if self._role != "decode":
            raise wrong_role("Push", self._role)
        receiver = self._new_receiver()
        try:
            async for push in request_iterator:
                ack = await receiver.handle(push)
                await context.write(ack)
                if ack.status in _LAST:
                    return
        finally:
            receiver.close()
