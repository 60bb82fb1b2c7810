"""What a worker can find again, as a router comes to know it."""

from __future__ import annotations

import random

from legato.cluster.prefix_map import PrefixMap
from legato.cluster.prompt_hashes import PromptHashes
from legato.protos import worker_pb2
from legato.protos.prefix_hash import PrefixHasher
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.prefix_log import PrefixLog, short
from legato.worker.services.prefix_reports import PrefixReports

BLOCK_SIZE = 4
WORKER = "w"


def identity(**changed: str) -> worker_pb2.WorkerIdentity:
    return worker_pb2.WorkerIdentity(
        model_fingerprint=changed.get("fingerprint", "m"),
        weights="float32",
        kv_layout=worker_pb2.KvLayout(block_size=BLOCK_SIZE, dtype=changed.get("dtype", "int8")),
    )


def compute(pool: BlockPool, token_ids: list[int], salt: str = "") -> None:
    """As a worker does with a prompt: it is there afterwards."""
    hashes = PrefixHasher("m", BLOCK_SIZE, salt, kv_kind="float32/int8").block_hashes(token_ids)
    found = pool.acquire(hashes, len(hashes))
    assert found is not None
    blocks, _ = found
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    pool.free(blocks)


def follow(reports: PrefixReports, known: PrefixMap) -> int:
    """All that there is to tell now; in so many pieces."""
    count = 0
    while (changes := reports.take()) is not None:
        known.note(WORKER, changes)
        count += 1
        assert len(changes.added) + len(changes.removed) <= 8
    return count


def test_a_router_knows_a_prompt_by_the_name_that_its_worker_gave_it() -> None:
    pool, known = BlockPool(100), PrefixMap()
    reports = PrefixReports(pool, 8)
    prompt = list(range(30))
    compute(pool, prompt[:17], salt="s")
    follow(reports, known)
    hashes = PromptHashes(prompt, "s").of(identity())
    assert len(hashes) == 7
    assert known.held_blocks(WORKER, hashes) == 4
    compute(pool, prompt, salt="s")
    follow(reports, known)
    assert known.held_blocks(WORKER, hashes) == 7
    for other in (
        PromptHashes(prompt, "another").of(identity()),
        PromptHashes(prompt, "s").of(identity(fingerprint="n")),
        PromptHashes(prompt, "s").of(identity(dtype="float32")),
        PromptHashes([1, *prompt], "s").of(identity()),
    ):
        assert known.held_blocks(WORKER, other) == 0


def test_the_routers_books_are_the_pools_whatever_happens() -> None:
    """Prompts come, others are evicted, a watcher looks now and then or much later."""
    dice = random.Random(3)
    pool = BlockPool(24)
    log_limit = 40
    pool._index.log = PrefixLog(log_limit)  # so that a slow watcher falls behind
    reports, known = PrefixReports(pool, 8), PrefixMap()
    resets = 0
    for _ in range(400):
        for _ in range(dice.choice((1, 1, 2, 12))):
            compute(pool, [dice.randrange(3) for _ in range(dice.randrange(4, 30))])
        while (changes := reports.take()) is not None:
            resets += changes.reset
            known.note(WORKER, changes)
        truth = {short(block_hash) for block_hash in pool.findable()[0]}
        assert known._held[WORKER] == truth
    assert resets > 3


def test_what_does_not_change_is_not_told() -> None:
    pool = BlockPool(100)
    reports = PrefixReports(pool, 8)
    first = reports.take()
    assert first is not None
    assert first.reset
    assert not first.added
    assert reports.take() is None
    compute(pool, list(range(40)))
    assert [len(c.added) for c in iter(reports.take, None)] == [8, 2]
    compute(pool, list(range(40)))
    assert reports.take() is None


def test_a_gap_a_new_stream_and_a_loss_are_a_clean_slate() -> None:
    known = PrefixMap()
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=5, added=[1]))  # its beginning is unknown
    assert not known.holds_any(WORKER)
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=0, reset=True, added=[1, 2]))
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=1, added=[3], removed=[2]))
    assert known.held_blocks(WORKER, [1, 3, 4]) == 2
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=3, added=[4]))
    assert not known.holds_any(WORKER)
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=0, reset=True, added=[7]))
    assert known.held_blocks(WORKER, [7]) == 1
    known.forget(WORKER)
    assert known.held_blocks(WORKER, [7]) == 0


def test_the_books_of_one_worker_are_bounded() -> None:
    known = PrefixMap(max_blocks=3)
    known.note(WORKER, worker_pb2.PrefixChanges(reset=True, added=range(10)))
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=1, added=[20]))
    assert known.held_blocks(WORKER, [0, 1, 2, 3]) == 3
    known.note(WORKER, worker_pb2.PrefixChanges(sequence=2, removed=[1], added=[20]))
    assert known.held_blocks(WORKER, [20]) == 1
