"""Fixtures that several files share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from canned_service import CannedService, Runner
from link_receiver import ROW_BYTES

from legato.worker.handoff import lanes, link, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter times; patience is long enough for a machine with other work to link again."""
    monkeypatch.setattr(link, "BEAT_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S", 0.5)
    monkeypatch.setattr(transfer, "PATIENCE_S", 2.5)
    monkeypatch.setattr(transfer, "UNREACHABLE_PATIENCE_S", 1.5)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows in a chunk."""
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(lanes, name, 10 * ROW_BYTES)
    return 10


@pytest.fixture
def service() -> Iterator[CannedService]:
    """For commands to ask."""
    canned = CannedService()
    yield canned
    canned.server.stop(0).wait(5)


@pytest.fixture
def run(service: CannedService, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs commands against `service`."""
    monkeypatch.delenv("LEGATO_ADDRESS", raising=False)
    return Runner(monkeypatch, service.port)
