"""CallFailedError: why a client's request failed, in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from legato.cluster.retry_policy import Failure


class CallFailedError(grpc.RpcError):
    """`code()` and `details()` as every gRPC error has them; of the last router asked, or ours."""

    def __init__(self, request_id: str, failure: Failure) -> None:
        super().__init__(f"{failure.code.name}: {failure.message}")
        self.request_id = request_id
        self.failure = failure

    def code(self) -> grpc.StatusCode:
        """CANCELLED where this client ended the request itself."""
        return self.failure.code

    def details(self) -> str:
        """One sentence."""
        return self.failure.message

    @property
    def reason(self) -> str:
        """For programs, such as INVALID_FIELD; empty where no service has said one."""
        return self.failure.reason

    @property
    def remedy(self) -> str:
        """What can be done, in one sentence; empty as `reason` is."""
        return self.failure.remedy
