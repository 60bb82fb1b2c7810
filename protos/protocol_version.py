"""PROTOCOL_VERSION: of worker.proto and kv_transfer.proto; both ends of a call say theirs."""

from __future__ import annotations

PROTOCOL_VERSION = 5
