"""Real workers: the KV goes to a second decode worker, and what is broken is never committed."""

from __future__ import annotations

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from worker_pair import Attempt, Pair, running_pair, running_worker, sampling

from legato.worker.services import prefill_call


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + 5) % VOCAB_SIZE for i in range(length)]


async def finish(attempt: Attempt) -> list[int]:
    """From Start on."""
    await attempt.start_decode()
    event = await attempt.handoff()
    assert event.WhichOneof("event") == "handoff_done", event
    assert event.handoff_done.num_retargets == 1
    while (event := await attempt.decode_call.read()) is not grpc.aio.EOF:
        attempt.tokens += [token.token_id for token in event.tokens.tokens]
    return attempt.tokens[len(attempt.prompt) :]


@pytest.mark.parametrize("moment", ["while it computes", "after HandoffFailed"])
async def test_a_second_decode_worker_gets_the_kv_without_a_second_prefill(moment: str) -> None:
    async with running_worker("prefill") as p, running_worker("decode") as second:
        async with running_worker("decode") as lost:
            attempt = Attempt(Pair(p, lost), prompt_of(20), sampling(8))
            await attempt.reserve()
            reserve = attempt.reserve_message()
            if moment == "while it computes":
                p.model.go.clear()
            attempt.start_prefill()
            if moment == "while it computes":
                await p.until(lambda load: load.running == 1)
            await lost.server.stop(0)
        if moment == "after HandoffFailed":
            await attempt.first_token()
            assert (await attempt.handoff()).handoff_failed.decode_lost
            assert p.load().held_blocks == 5
        attempt.pair, reserve.key.attempt = Pair(p, second), 1
        ticket = await attempt.reserve_once(reserve)
        await attempt.retarget(ticket, second.address)
        if moment == "while it computes":
            p.model.go.set()
            await attempt.first_token()
        assert await finish(attempt) == p.model.expected(prompt_of(20), 8)
        assert p.load().prefill_tokens == 20
        await attempt.pair.until_idle()


async def test_blocks_that_nobody_retargets_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_call, "RETARGET_WAIT_S", 0.1)
    async with running_worker("prefill") as p:
        async with running_worker("decode") as lost:
            attempt = Attempt(Pair(p, lost), prompt_of(20), sampling(8))
            await attempt.reserve()
            address = lost.address
            await lost.server.stop(0)
        attempt.start_prefill(address)
        await attempt.first_token()
        assert (await attempt.handoff()).handoff_failed.decode_lost
        assert await attempt.handoff() is grpc.aio.EOF
        await p.until_idle()


async def test_rows_without_usable_logits_are_committed_nowhere() -> None:
    async with running_pair() as pair:
        pair.p.model.breaks_after = {prompt_of(20)[-1]}
        attempt = Attempt(pair, prompt_of(20), sampling(8))
        await attempt.reserve()
        attempt.start_prefill()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await attempt.first_token()
        assert "no usable logits" in (raised.value.details() or "")
        attempt.close()
        await pair.until_idle()
        assert pair.d.load().kv_transfers_completed == 0
        assert pair.d.load().cached_blocks == 0
