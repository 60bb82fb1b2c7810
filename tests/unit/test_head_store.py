"""What the controller notes is kept, and who waits for it is told right; no Ray is started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from legato.cluster.actors.head_store import HeadStore
from legato.cluster.adoption import ControllerMemory

if TYPE_CHECKING:
    import pytest

    from legato.cluster.control_plane import Role


def memory(decode: int) -> ControllerMemory:
    targets: dict[Role, int] = {"decode": decode}
    none: dict[Role, int] = {"decode": 0}
    return ControllerMemory(targets, none, {}, none, closed=False)


async def test_an_order_is_kept_whatever_is_noted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HeadStore("n")
    put: list[object] = []

    async def keep(key: str, value: object) -> None:
        await asyncio.sleep(0)
        put.append(value)

    monkeypatch.setattr(store, "keep", keep)
    assert not store.is_behind
    store.note(memory(1))
    number = store.num_noted
    assert store.is_behind
    assert not store.has_kept(number)
    await store.flush()
    store.note(memory(2))  # before whoever waited has had its turn
    assert store.has_kept(number)
    assert not store.has_kept(store.num_noted)
    await store.flush()
    assert store.has_kept(store.num_noted)
    assert put == [memory(1).to_json(), memory(2).to_json()]


async def test_what_is_noted_while_it_writes_is_written_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HeadStore("n")
    put: list[object] = []

    async def keep(key: str, value: object) -> None:
        put.append(value)
        if len(put) == 1:
            store.note(memory(2))

    monkeypatch.setattr(store, "keep", keep)
    store.note(memory(1))
    await store.flush()
    assert not store.is_behind
    assert put == [memory(1).to_json(), memory(2).to_json()]
