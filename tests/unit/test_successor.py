"""A warm worker goes on in another role: same weights, no file read, one KV pool at a time."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import weakref
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_engine import fake_loaded
from oracle import greedy, load_oracle
from tiny_models import make_llama_folder
from worker_pair import Attempt, Pair, Worker, sampling

from legato.protos import common_pb2, worker_pb2
from legato.worker import successor
from legato.worker.channel import CHANNEL_OPTIONS
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import KvCache
from legato.worker.kv_budget import KvBudget
from legato.worker.server import WorkerServer
from legato.worker.spare_memory import keep_objects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from legato.worker.config import Role

PROMPTS = [[(7 * n + 13 * i * i + i) % 256 for i in range(n)] for n in (1, 15, 16, 17, 47)]
PARAMS = sampling(12, ignore_eos=True)
WIRE_ROLES = {"prefill": common_pb2.WORKER_ROLE_PREFILL, "decode": common_pb2.WORKER_ROLE_DECODE}


def worker_config(model: Path | str, role: Role, **settings: Any) -> WorkerConfig:  # noqa: ANN401  # of WorkerConfig
    settings = {"kv_memory_bytes": 4 << 20, "num_threads": 1, "device": "cpu", **settings}
    return WorkerConfig(model=str(model), role=role, **settings)


@asynccontextmanager
async def serving(*servers: WorkerServer) -> AsyncIterator[Pair]:
    """Those two, a prefill and a decode worker, started; stopped at the end."""
    async with AsyncExitStack() as stack:
        workers = []
        for server in servers:
            address = await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            stack.push_async_callback(channel.close)
            workers.append(Worker(server, None, address, channel))
        yield Pair(*workers)


async def answers(pair: Pair) -> list[list[int]]:
    found = [await Attempt(pair, p, PARAMS, request_id=f"r{len(p)}").run() for p in PROMPTS]
    await pair.until_idle()
    return found


async def test_a_pair_flips_both_ways_and_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama_folder(tmp_path / "tiny")
    oracle = load_oracle(folder)
    expected = [greedy(oracle, prompt, 12) for prompt in PROMPTS]
    opened: list[str] = []

    def watch(real: Any) -> Any:  # noqa: ANN401  # any opener
        def look(path: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the real one
            if str(tmp_path) in str(path):
                opened.append(str(path))
            return real(path, *args, **kwargs)

        return look

    for owner in (builtins, io, os):
        monkeypatch.setattr(owner, "open", watch(owner.open))
    first, second = (WorkerServer(worker_config(folder, role)) for role in ("prefill", "decode"))
    ids = set()
    async with serving(first, second) as pair:
        assert await answers(pair) == expected
        ids |= {first.worker_id, second.worker_id}
    weights = [server._loaded for server in (first, second)]
    assert opened, "this test does not see how the weights are read"
    shutil.rmtree(folder)
    opened.clear()

    for turn in range(2):
        roles: tuple[Role, Role] = ("decode", "prefill") if turn == 0 else ("prefill", "decode")
        first = await first.successor(worker_config(folder, roles[0]))
        second = await second.successor(worker_config(folder, roles[1]))
        by_role = (second, first) if turn == 0 else (first, second)
        async with serving(*by_role) as pair:
            assert await answers(pair) == expected
            for worker, role in ((pair.p, "prefill"), (pair.d, "decode")):
                identity = await worker.control.GetIdentity(worker_pb2.GetIdentityRequest())
                assert identity.role == WIRE_ROLES[role]
                assert identity.worker_id.startswith(role)
                assert identity.worker_id not in ids, "an identity came back"
                ids.add(identity.worker_id)
    assert [server._loaded for server in (first, second)] == weights
    assert len(ids) == 6
    assert opened == []


async def test_the_old_pool_is_gone_before_the_new_one_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[weakref.ref[KvCache]] = []
    most = []
    real = KvCache.__init__

    def allocate(self: KvCache, *args: Any) -> None:  # noqa: ANN401  # as the real one
        real(self, *args)
        alive.append(weakref.ref(self))
        most.append(sum(ref() is not None for ref in alive))

    monkeypatch.setattr(KvCache, "__init__", allocate)
    server = WorkerServer(worker_config("fake", "prefill"), fake_loaded())
    for role in ("decode", "prefill", "decode"):
        await server.start()
        keep_objects()  # as its process does: no collection looks at what is there now
        await server.stop(0)
        server = await server.successor(worker_config("fake", role))  # type: ignore[arg-type]  # literals
    assert most == [1, 1, 1]


async def test_a_pool_that_is_still_held_is_an_error_and_no_second_one_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(successor, "FREE_TIMEOUT_S", 0.1)
    server = WorkerServer(worker_config("fake", "prefill"), fake_loaded())
    await server.start()
    held = server.node.cache
    await server.stop(0)
    with pytest.raises(RuntimeError, match=r"KV memory of the old role is still in use"):
        await server.successor(worker_config("fake", "decode"))
    assert held.num_blocks > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "bfloat16"}, r"dtype is 'auto' as prefill, 'bfloat16' as decode: .* float32"),
        ({"weights": "int8"}, r"weights is 'auto' as prefill, 'int8' as decode"),
        ({"model": "other"}, r"model is 'fake' as prefill, 'other' as decode"),
        ({"context_length": 99}, r"context_length is None as prefill, 99 as decode"),
        ({"deterministic": True}, r"deterministic is False as prefill, True as decode"),
    ],
)
async def test_other_weights_are_refused(settings: dict[str, Any], sentence: str) -> None:
    server = WorkerServer(worker_config("fake", "prefill"), fake_loaded())
    await server.start()
    await server.stop(0)
    with pytest.raises(ValueError, match=sentence):
        await server.successor(replace(worker_config("fake", "decode"), **settings))
    # The same dtype by another name will do.
    after = await server.successor(worker_config("fake", "decode", dtype="float32"))
    assert await after.start()
    await after.stop(0)


async def test_a_worker_that_has_not_started_has_no_successor() -> None:
    server = WorkerServer(worker_config("fake", "prefill"), fake_loaded())
    with pytest.raises(RuntimeError, match="has not started"):
        await server.successor(worker_config("fake", "decode"))


async def test_a_fraction_of_the_memory_is_taken_once() -> None:
    """Others have taken their part since: the same fraction of what is left would be less."""
    config = worker_config("fake", "prefill", kv_memory_fraction=0.0001, max_batch_size=4)
    loaded = fake_loaded()
    before = KvBudget.of(config, loaded)
    less = replace(config, role="decode", kv_memory_fraction=0.00001)
    after = KvBudget.of(less, loaded, inherited_bytes=before.num_bytes)
    assert after.num_blocks == before.num_blocks
    assert "as taken before" in after.summary()
    huge = KvBudget.of(less, loaded, inherited_bytes=1 << 60)
    assert huge.num_bytes < 1 << 60, "more than is free"
