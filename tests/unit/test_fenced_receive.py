"""The fence at a worker: what its engine decodes are the rows that were sent, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fake_engine import VOCAB_SIZE, FakeModel, fake_config
from kv_link import COMMITTED, LAYERS, OK, REFUSED, RESEND, Link, Rows
from worker_pair import Attempt, Pair, running_pair, running_worker, sampling

if TYPE_CHECKING:
    import pytest
    from worker_pair import Worker

TOKENS = 10
MODEL = FakeModel(fake_config())
PROMPT = [(i * 37 + 5) % VOCAB_SIZE for i in range(TOKENS)]
ALL_ROWS = LAYERS * TOKENS


def kv_of(prompt: list[int]) -> torch.Tensor:
    """[LAYERS, 2, tokens, heads, head_dim]."""
    rows = MODEL.rows(torch.tensor(prompt), torch.arange(len(prompt)))
    return rows.permute(1, 2, 0, 3, 4).to(torch.float32)


KV = kv_of(PROMPT)
PIECES = [Rows((0, 1), (0, 10)), Rows((1, 3), (0, 4)), Rows((1, 3), (4, 10))]


async def reserved(worker: Worker, request_id: str = "r") -> Attempt:
    attempt = Attempt(Pair(worker, worker), PROMPT, sampling(16), request_id=request_id)
    await attempt.reserve_once()
    return attempt


async def greeted(worker: Worker) -> Link:
    link = Link(worker.channel, worker.server.node.identity)
    await link.hello()
    return link


async def decoded(attempt: Attempt) -> list[int]:
    """Starts decode with the true first token; returns all 16."""
    attempt.tokens += MODEL.expected(PROMPT, 1)
    attempt.answers = {0: attempt.tokens[-1:]}
    await attempt.start_decode()
    await attempt.finish_all()
    return attempt.answers[0]


async def test_rows_in_any_order_and_twice_give_the_right_answer() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker)
        ticket = attempt.ticket
        assert ticket is not None
        assert ticket.cached_tokens == 0
        link = await greeted(worker)
        await link.ok(link.open_bytes(ticket, TOKENS))
        damaged = await link.ask(link.rows_bytes(ticket, PIECES[0], KV, damage=9))
        assert damaged.status == RESEND
        assert worker.load().transferring == 1
        for rows in [*reversed(PIECES), PIECES[1], Rows((0, 3), (2, 7), (1, 2))]:
            assert (await link.ask(link.rows_bytes(ticket, rows, KV))).status == OK
        assert (await link.ask(link.close_bytes(ticket, ALL_ROWS))).status == COMMITTED
        assert await decoded(attempt) == MODEL.expected(PROMPT, 16)
        await worker.until_idle()
        # The next one is told what is here.
        again = await reserved(worker, "again")
        assert again.ticket is not None
        assert again.ticket.cached_tokens == 8
        assert worker.load().cached_blocks > 0, "only a look"
        again.close()
        await worker.until_idle()


async def test_a_stray_frame_of_an_old_epoch_leaves_the_new_owner_alone() -> None:
    async with running_worker("decode", num_blocks=7) as worker:  # the pool is one request
        old = await reserved(worker, "old")
        assert old.ticket is not None
        link = await greeted(worker)
        await link.ok(link.open_bytes(old.ticket, TOKENS))
        await link.ok(link.rows_bytes(old.ticket, PIECES[0], KV))
        old.close()
        await worker.until(lambda load: load.held_blocks == 0)
        new = await reserved(worker, "new")
        ticket = new.ticket
        assert ticket is not None
        await link.ok(link.open_bytes(ticket, TOKENS))
        await link.ok(*(link.rows_bytes(ticket, rows, KV) for rows in PIECES))
        stray = await link.ask(link.rows_bytes(old.ticket, PIECES[0], KV + 1))
        assert stray.status == REFUSED
        await link.ok(link.close_bytes(ticket, ALL_ROWS))
        assert await decoded(new) == MODEL.expected(PROMPT, 16)
        await worker.until_idle()


async def test_what_was_cut_off_is_never_found() -> None:
    async with running_worker("decode") as worker:
        attempt = await reserved(worker, "cut")
        ticket = attempt.ticket
        assert ticket is not None
        link = await greeted(worker)
        # Every row, but no commit.
        await link.ok(link.open_bytes(ticket, TOKENS))
        await link.ok(*(link.rows_bytes(ticket, rows, KV) for rows in PIECES))
        attempt.close()
        await worker.until_idle()
        assert worker.load().cached_blocks == 0
        second = await reserved(worker)
        assert second.ticket is not None
        opened = await link.ask(link.open_bytes(second.ticket, TOKENS))
        assert (opened.reused_tokens, list(opened.landed_tokens)) == (0, [0] * LAYERS)
        second.close()
        await worker.until_idle()


async def test_the_sender_repeats_damaged_chunks_and_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_pair() as pair:
        read = pair.p.server.node.pager.read
        bad = 2

        async def damaging(*args: Any) -> int:  # noqa: ANN401  # passed on as they came
            nonlocal bad
            crc = await read(*args)
            bad -= 1
            return crc ^ 1 if bad >= 0 else crc

        monkeypatch.setattr(pair.p.server.node.pager, "read", damaging)
        answer = await Attempt(pair, PROMPT, sampling(16)).run()
        assert answer == MODEL.expected(PROMPT, 16)
        assert pair.d.load().kv_chunks_refused == 2

        bad = 1000
        attempt = Attempt(pair, PROMPT, sampling(16))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert "arrived damaged" in event.handoff_failed.reason
        attempt.close()
        await pair.until_idle()


async def test_a_refusal_reaches_the_router_with_its_reason() -> None:
    async with running_pair(p={"fingerprint": "another"}) as pair:
        attempt = Attempt(pair, PROMPT, sampling(16))
        await attempt.reserve()
        attempt.start_prefill()
        await attempt.first_token()
        event = await attempt.handoff()
        assert event.handoff_failed.decode_lost
        assert "model_fingerprint" in event.handoff_failed.reason
        attempt.close()
        await pair.until_idle()
