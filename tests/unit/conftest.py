"""Fixtures that several files share."""

from __future__ import annotations

import pytest
from link_receiver import ROW_BYTES

from legato.worker.handoff import lanes, link, transfer


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
