"""A decode worker that prefills prompts itself, over its real port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from kv_link import REFUSED, Link
from worker_pair import Attempt, Pair, running_pair, sampling

from legato.protos import common_pb2, worker_pb2
from legato.protos.never_retry import NEVER_RETRY
from legato.worker.engine import Engine
from legato.worker.local_prefill import LocalPrefill

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture(autouse=True, params=[False, True], ids=["apart", "overlapping"])
def _overlapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {**(Engine.__init__.__kwdefaults__ or {}), "overlap": request.param}
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", defaults)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


def local(pair: Pair, prompt: Sequence[int], max_tokens: int = 6, **settings: Any) -> Attempt:  # noqa: ANN401  # of Attempt
    return Attempt(pair, prompt, settings.pop("params", sampling(max_tokens)), **settings)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33, 70])
async def test_the_answer_and_its_figures_are_those_of_a_prefill_worker(length: int) -> None:
    async with running_pair() as pair:
        prompt = prompt_of(length)
        for turn in range(2):
            before = pair.d.load()
            attempt = local(pair, prompt)
            assert await attempt.run_locally() == pair.d.model.expected(prompt, 6)
            first, last, load = attempt.first, attempt.finish, pair.d.load()
            assert first is not None
            cached = (length - 1) // 4 * 4 if turn else 0
            assert first.cached_tokens == cached
            assert first.prefill_forwards == -(-(length - cached) // 32)
            assert last.decode_forwards == 5
            assert first.wait_s >= 0
            assert first.model_s > 0
            assert last.model_s > 0
            assert load.prefill_tokens - before.prefill_tokens == length - cached
            assert load.prefill_steps - before.prefill_steps == first.prefill_forwards
            assert load.decode_tokens - before.decode_tokens == 5
            assert load.local_prefill_token_s > 0
            await pair.until_idle()
        assert pair.d.load().kv_bytes_received == pair.p.load().prefill_steps == 0


async def test_what_was_computed_here_is_found_by_a_hand_off_and_the_other_way_round() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(20)
        await local(pair, prompt).run_locally()
        handed_over = local(pair, prompt)
        assert await handed_over.run() == pair.d.model.expected(prompt, 6)
        assert handed_over.handed_over.reused_tokens == 20
        other = prompt_of(20, salt=3)
        await local(pair, other).run()
        again = local(pair, [*other, 7])
        assert await again.run_locally() == pair.d.model.expected([*other, 7], 6)
        assert again.first is not None
        assert again.first.cached_tokens == 20
        await pair.until_idle()


async def test_many_at_once_beside_streams_that_were_handed_over() -> None:
    async with running_pair(d={"max_batch_size": 5}) as pair:
        prompts = [prompt_of(3 + 11 * i, salt=i) for i in range(9)]
        runs = [
            attempt.run_locally() if i % 3 else attempt.run()
            for i, attempt in enumerate(
                local(pair, p, 12, request_id=f"r{i}") for i, p in enumerate(prompts)
            )
        ]
        answers = await asyncio.gather(*runs)
        assert answers == [pair.d.model.expected(prompt, 12) for prompt in prompts]
        await pair.until_idle()


async def test_a_replay_and_an_end_with_the_first_token() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(9)
        plain = pair.d.model.expected(prompt, 10)
        again = local(pair, prompt, 10, attempt=1, emitted=plain[:4])
        assert await again.run_locally() == plain
        ended = local(pair, prompt, 10, eos=[plain[0]])
        assert await ended.run_locally() == plain[:1]
        assert ended.first is not None
        assert ended.first.answers[0].finish_reason == common_pb2.FINISH_REASON_STOP
        await pair.until_idle()


@pytest.mark.parametrize("fields", [{"num_answers": 2}, {"answers": [(0, 5)]}])
async def test_only_one_answer_that_has_not_begun(fields: dict[str, Any]) -> None:
    async with running_pair() as pair:
        attempt = local(pair, prompt_of(9), num_answers=fields.get("num_answers", 1))
        await attempt.reserve()
        answers = [
            worker_pb2.StartAnswer(answer=a, token_id=t) for a, t in fields.get("answers", [])
        ]
        await attempt.command(start=worker_pb2.Start(local_prefill=True, answers=answers))
        with pytest.raises(grpc.aio.AioRpcError, match="local_prefill is set and") as raised:
            await attempt.decode_call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await pair.until_idle()


async def test_no_transfer_begins_beside_it_and_it_does_not_begin_beside_a_transfer() -> None:
    async with running_pair() as pair:
        attempt = local(pair, prompt_of(10), 100)
        await attempt.reserve()
        pair.d.model.go.clear()
        await attempt.start_locally()
        await asyncio.to_thread(pair.d.model.inside.wait, 20)
        assert attempt.ticket is not None
        link = Link(pair.d.channel, pair.d.server.node.identity)
        await link.hello()
        receipt = await link.ask(link.open_bytes(attempt.ticket, 10))
        assert receipt.status == REFUSED
        assert "the ticket is DECODING" in receipt.reason
        pair.d.model.go.set()
        await attempt.local_first_token()
        attempt.close()

        other = local(pair, prompt_of(10), request_id="other")
        await other.reserve()
        assert other.ticket is not None
        await link.ok(link.open_bytes(other.ticket, 10))
        await other.start_locally()
        with pytest.raises(grpc.aio.AioRpcError, match="a transfer has begun") as raised:
            await other.decode_call.read()
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await pair.until_idle()


@pytest.mark.parametrize("how", ["stop", "cancel"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_stop_and_cancel_between_the_pieces_free_all(how: str, num_steps: int) -> None:
    async with running_pair() as pair:
        model = pair.d.model
        attempt = local(pair, prompt_of(150), 50)
        await attempt.reserve()
        model.go.clear()
        await attempt.start_locally()
        for _ in range(num_steps):
            await asyncio.to_thread(model.inside.wait, 20)
            model.inside.clear()
            model.go.set()
            model.go.clear()
        if how == "stop":
            await attempt.stop(0)
        else:
            attempt.close()
        if how == "stop":
            assert await attempt.decode_call.read() == grpc.aio.EOF, "while a step is under way"
            assert await attempt.decode_call.code() is grpc.StatusCode.OK
        tickets = pair.d.server.node.tickets
        await pair.d.until(lambda _: len(tickets) == 0)  # the call is over, its step is not
        model.go.set()
        await pair.until_idle()
        assert sum(max(step) for step in model.steps) < 150, "it went on"
        # The engine lives: a stop before the first token is no answer of no tokens.
        assert await local(pair, prompt_of(5), request_id="x").run_locally() == model.expected(
            prompt_of(5), 6
        )
        await pair.until_idle()


async def test_the_deadline_frees_all() -> None:
    async with running_pair() as pair:
        model = pair.d.model
        model.go.clear()
        attempt = local(pair, prompt_of(150), 50)
        attempt.decode_call = pair.d.decode.Decode(timeout=0.3)
        reserve = attempt.reserve_message()
        await attempt.decode_call.write(worker_pb2.DecodeCommand(reserve=reserve))
        await attempt.decode_call.read()
        await attempt.start_locally()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await attempt.local_first_token()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        model.go.set()
        await pair.until_idle()


async def test_a_prompt_without_usable_logits_ends_alone_and_leaves_no_cached_block() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(40)
        pair.d.model.breaks_after = {prompt[-1]}
        attempt = local(pair, prompt)
        neighbour = local(pair, [1, 2, 3], 30, request_id="n")
        running = asyncio.create_task(neighbour.run_locally())
        with pytest.raises(grpc.aio.AioRpcError, match="at output position 0 ") as raised:
            await attempt.run_locally()
        assert NEVER_RETRY in tuple(raised.value.trailing_metadata() or ())
        assert await running == pair.d.model.expected([1, 2, 3], 30)
        await pair.until_idle()
        again = local(pair, [*prompt[:-1], 3, 4])
        assert await again.run_locally() == pair.d.model.expected([*prompt[:-1], 3, 4], 6)
        assert again.first is not None
        assert again.first.cached_tokens == 0
        await pair.until_idle()


def test_the_cost_is_a_mean_over_tokens_that_follows_the_load_and_is_forgotten() -> None:
    cost = LocalPrefill()
    assert cost.token_s_at(0.0) == 0.0
    cost = cost.after(10, 1.0, 5.0)
    assert cost.token_s_at(6.0) == pytest.approx(0.1)
    cost = cost.after(30, 1.0, 7.0)
    assert cost.token_s_at(7.0) == pytest.approx(2.0 / 40)
    assert (cost.num_steps, cost.num_tokens) == (2, 40)
    for _ in range(100):
        cost = cost.after(32, 0.32, 8.0)
    assert cost.token_s_at(8.0) == pytest.approx(0.01, rel=0.01)
    assert cost.token_s_at(37.9) > 0
    assert cost.token_s_at(38.1) == 0.0
