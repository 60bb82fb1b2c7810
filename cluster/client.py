"""The Python client: what a user imports."""

from __future__ import annotations

from legato.cluster.async_client import AsyncClient, AsyncStream
from legato.cluster.blocking_client import Client, Stream
from legato.cluster.client_access import ClientAccess, ClientTls
from legato.cluster.client_errors import CallFailedError
from legato.cluster.client_events import AnswerResult, Event, Finished, Result, Tokens
from legato.cluster.client_requests import Prompt, RequestSettings, make_request
from legato.cluster.retry_policy import RetryOptions

__all__ = [
    "AnswerResult",
    "AsyncClient",
    "AsyncStream",
    "CallFailedError",
    "Client",
    "ClientAccess",
    "ClientTls",
    "Event",
    "Finished",
    "Prompt",
    "RequestSettings",
    "Result",
    "RetryOptions",
    "Stream",
    "Tokens",
    "make_request",
]
