"""Real workers: an answer moves from one decode worker to another with its KV, at any moment."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fake_engine import VOCAB_SIZE
from model_checks import build, random_tokens, reference_logits
from moving import Moving, Stay, StepGate
from tiny_models import make_model
from worker_pair import WAIT_S, Attempt, Pair, Worker, running_pair, running_worker, sampling

from legato.protos import worker_pb2
from legato.worker.commands import Park, Resume
from legato.worker.services import answer_moves

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


NUM_TOKENS = 12
BYTES_PER_ROW = 3 * 2 * 2 * 4 * 4  # layers, K and V, heads, head_dim, fp32


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + 5) % VOCAB_SIZE for i in range(length)]


@asynccontextmanager
async def three(**settings: Any) -> AsyncIterator[tuple[Worker, Worker, Worker]]:  # noqa: ANN401  # of WorkerConfig
    """A prefill worker and two decode workers."""
    async with (
        running_worker("prefill", **settings) as p,
        running_worker("decode", **settings) as a,
        running_worker("decode", **settings) as b,
    ):
        yield p, a, b


async def all_idle(*workers: Worker) -> None:
    for worker in workers:
        await worker.until_idle()


async def parked_after(
    moving: Moving, a: Worker, gate: StepGate, num_tokens: int
) -> tuple[Stay, worker_pb2.Parked]:
    """The first so many tokens are there; one is prefill's."""
    gate.arm(num_tokens - 1)
    stay = await moving.begin(a)
    await gate.until_inside()
    await stay.pause()
    await gate.until_told(Park)
    gate.go.set()
    parked = await stay.parked()
    assert parked is not None
    return stay, parked


# --- identical ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["grpc", "auto"])
async def test_a_move_at_every_token_gives_the_unmoved_answer(lane: str) -> None:
    async with three(kv_lane=lane, prefix_cache=False) as (p, a, b):
        gate = StepGate(a)
        prompt = prompt_of(10)
        for num_tokens in range(2, NUM_TOKENS):
            for seed in (0, 5):
                moving = Moving(p, prompt, sampling(NUM_TOKENS, seed=seed), f"r{num_tokens}-{seed}")
                sent, prefilled = a.load().kv_bytes_sent, p.load().prefill_tokens
                stay, parked = await parked_after(moving, a, gate, num_tokens)
                assert parked.num_rows == len(prompt) + num_tokens - 1
                onward, moved = await moving.moved(stay, b)
                assert await stay.call.read() == grpc.aio.EOF, "its call ends with it"
                await onward.to_the_end()
                moving.note(onward)
                assert moving.tokens == p.model.expected(prompt, NUM_TOKENS, seed)
                assert moved.kv_bytes == parked.num_rows * BYTES_PER_ROW
                assert a.load().kv_bytes_sent - sent == moved.kv_bytes
                assert p.load().prefill_tokens - prefilled == len(prompt), "nothing is prefilled"
                assert b.load().prefill_tokens == 0
        await all_idle(p, a, b)


PARAMS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "top_k": 20,
        "min_tokens": 8,
    },
    "logprobs": {"temperature": 0.7, "seed": 11, "logprobs": 3},
}


@pytest.mark.parametrize("kind", PARAMS)
async def test_of_a_real_model_too(kind: str) -> None:
    reference = make_model("llama")
    model = build(reference)
    params = sampling(NUM_TOKENS, ignore_eos=True, **PARAMS[kind])
    prompt = random_tokens(13)
    async with three(config=model.config, model=model) as (p, a, b):
        unmoved = Moving(p, prompt, params, "unmoved")
        stay = await unmoved.begin(a)
        await stay.to_the_end()
        unmoved.note(stay)
        if kind == "greedy":
            logits = reference_logits(reference, prompt + unmoved.tokens)
            assert unmoved.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        gate = StepGate(a)
        for num_tokens in range(2, NUM_TOKENS):
            moving = Moving(p, prompt, params, f"r{num_tokens}")
            stay, _ = await parked_after(moving, a, gate, num_tokens)
            onward, moved = await moving.moved(stay, b)
            await onward.to_the_end()
            moving.note(onward)
            assert moving.sampled == unmoved.sampled, "tokens, indices or logprobs differ"
            assert moved.reused_tokens % 4 == 0
        await all_idle(p, a, b)


async def test_back_and_forth() -> None:
    # Room for two: what is expected of the answer is counted until its call has ended.
    async with three(prefix_cache=False, num_blocks=128) as (p, a, b):
        prompt, length = prompt_of(9), 200
        for worker in (a, b):  # it does not end before it is told to leave
            StepGate(worker).step_s = 0.02
        moving = Moving(p, prompt, sampling(length))
        stay = await moving.begin(a)
        here, there, num_moves = a, b, 0
        while True:
            # An answer that ends by itself takes its call with it, and what is written to it then.
            if len(moving.tokens) > length // 2:
                break
            await stay.pause()
            assert await stay.parked() is not None
            stay, _ = await moving.moved(stay, there)
            assert (await stay.read()).WhichOneof("event") == "joined"
            here, there, num_moves = there, here, num_moves + 1
        await stay.to_the_end()
        moving.note(stay)
        assert moving.tokens == p.model.expected(prompt, length)
        assert num_moves > 5
        await all_idle(p, a, b)


async def test_several_answers_move_each_by_itself_and_the_rest_stays() -> None:
    async with three() as (p, a, b):
        prompt = prompt_of(10)
        attempt = Attempt(Pair(p, a), prompt, sampling(40), num_answers=3)
        gate = StepGate(a)
        gate.arm(6)
        await attempt.begin()
        await gate.until_inside()
        answers = {n: list(tokens) for n, tokens in attempt.answers.items()}
        call = attempt.decode_call
        parked: set[int] = set()
        for answer in (0, 2):
            pause = worker_pb2.Pause(answer=answer, number=1)
            await call.write(worker_pb2.DecodeCommand(pause=pause))
        await gate.until_told(Park, 2)
        gate.go.set()
        streams: dict[int, Stay] = {}
        over = False
        while not (over and len(streams) == 2):
            event = await call.read()
            match event.WhichOneof("event"):
                case "tokens":
                    answer = event.tokens.answer
                    assert answer not in parked
                    for token in event.tokens.tokens:
                        assert token.index == len(answers[answer])
                        answers[answer].append(token.token_id)
                    over = over or event.tokens.finished
                case "parked":
                    answer = event.parked.answer
                    parked.add(answer)
                    moving = Moving(p, prompt, sampling(40, seed=answer), "r")
                    moving.sampled = [worker_pb2.SampledToken(token_id=t) for t in answers[answer]]
                    target, ticket = await moving.ticket(b)
                    move = worker_pb2.Move(
                        answer=answer, number=1, ticket=ticket, decode_address=b.address
                    )
                    await call.write(worker_pb2.DecodeCommand(move=move))
                    streams[answer] = await moving.go_on(b, target)
        await call.done_writing()
        while (event := await call.read()) != grpc.aio.EOF:
            assert event.WhichOneof("event") == "moved"
        for answer, stay in streams.items():
            answers[answer] += [token.token_id for token in await stay.to_the_end()]
        for answer, tokens in answers.items():
            assert tokens == p.model.expected(prompt, 40, answer), answer
        assert p.load().prefill_tokens == len(prompt)
        await all_idle(p, a, b)


# --- what ends or fails on the way --------------------------------------------------------------


async def test_an_answer_that_ends_before_it_is_parked_ends_as_ever() -> None:
    async with running_pair() as pair:
        p, a = pair.p, pair.d
        gate = StepGate(a)
        gate.arm(NUM_TOKENS - 1)
        moving = Moving(p, prompt_of(10), sampling(NUM_TOKENS))
        stay = await moving.begin(a)
        await gate.until_inside()
        await stay.pause()
        await gate.until_told(Park)
        gate.go.set()
        assert await stay.parked() is None
        assert await stay.call.read() == grpc.aio.EOF
        await pair.until_idle()


@pytest.mark.parametrize("when", ["pausing", "parked", "failed", "silence"])
async def test_one_that_resumes_goes_on_where_it_was(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "silence":
        monkeypatch.setattr(answer_moves, "PARKED_FOR_S", 0.1)
    async with running_pair() as pair:
        p, a = pair.p, pair.d
        gate = StepGate(a)
        moving = Moving(p, prompt_of(10), sampling(NUM_TOKENS))
        if when == "pausing":
            gate.arm(4)
            stay = await moving.begin(a)
            await gate.until_inside()
            await stay.pause()
            await stay.resume()
            await gate.until_told(Resume)
            gate.go.set()
        else:
            stay, _ = await parked_after(moving, a, gate, 5)
            assert a.load().running == 1
        if when == "failed":
            ticket = worker_pb2.KvTicket(epoch=5, worker_id="nobody")
            ticket.key.request_id = "r"
            await moving.move(stay, ticket, a.address)
            event = await stay.read()
            assert event.WhichOneof("event") == "move_failed"
            assert event.move_failed.refused, event
        if when in ("parked", "failed"):
            await stay.resume()
        await stay.to_the_end()
        moving.note(stay)
        assert moving.tokens == p.model.expected(prompt_of(10), NUM_TOKENS)
        await pair.until_idle()


async def test_a_move_that_comes_too_late_fails_and_the_answer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_moves, "PARKED_FOR_S", 0.05)
    async with three() as (p, a, b):
        gate = StepGate(a)
        moving = Moving(p, prompt_of(10), sampling(NUM_TOKENS))
        stay, _ = await parked_after(moving, a, gate, 5)
        call, ticket = await moving.ticket(b)
        gate.arm(1)
        await gate.until_inside()  # it has gone on, and stands in its next step
        await moving.move(stay, ticket, b.address)
        event = await stay.read()
        assert event.WhichOneof("event") == "move_failed", event
        assert event.move_failed.reason == "the answer is not parked"
        gate.go.set()
        await stay.to_the_end()
        moving.note(stay)
        assert moving.tokens == p.model.expected(prompt_of(10), NUM_TOKENS)
        call.cancel()
        await all_idle(p, a, b)


async def test_a_row_too_few_or_too_many_is_refused_and_another_move_goes() -> None:
    async with three(prefix_cache=False) as (p, a, b):
        gate = StepGate(a)
        moving = Moving(p, prompt_of(10), sampling(NUM_TOKENS))
        stay, parked = await parked_after(moving, a, gate, 5)
        moving.note(stay)
        last = moving.sampled.pop()
        call, ticket = await moving.ticket(b)
        await moving.move(stay, ticket, b.address)
        event = await stay.read()
        assert event.WhichOneof("event") == "move_failed"
        assert "num_tokens" in event.move_failed.reason
        call.cancel()
        moving.sampled.append(last)
        onward, moved = await moving.moved(stay, b)
        assert moved.kv_bytes == parked.num_rows * BYTES_PER_ROW
        await onward.to_the_end()
        moving.note(onward)
        assert moving.tokens == p.model.expected(prompt_of(10), NUM_TOKENS)
        await all_idle(p, a, b)


STAGES = ["pausing", "parked", "ticketed", "sending", "landed"]


@pytest.mark.parametrize("lane", ["grpc", "auto"])
@pytest.mark.parametrize("who", ["source", "both"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_move_that_is_cancelled_leaves_nothing(stage: str, who: str, lane: str) -> None:
    """`source`: its call ends, and the target's after that was noticed."""
    async with three(kv_lane=lane, prefix_cache=False) as (p, a, b):
        gate = StepGate(a)
        moving = Moving(p, prompt_of(30), sampling(NUM_TOKENS))
        if stage == "pausing":
            gate.arm(4)
            stay = await moving.begin(a)
            await gate.until_inside()
            await stay.pause()
        else:
            stay, _ = await parked_after(moving, a, gate, 5)
            moving.note(stay)
            assert a.load().held_blocks > 0
        if STAGES.index(stage) >= STAGES.index("ticketed"):
            _, ticket = await moving.ticket(b)
            assert b.load().reserved_blocks > 0
            if stage == "sending":
                progress = hold_commits(a)
                await moving.move(stay, ticket, b.address)
                await b.until(lambda load: load.transferring == 1)
                assert progress is not None
            elif stage == "landed":
                await moving.move(stay, ticket, b.address)
                assert (await stay.read()).WhichOneof("event") == "moved"
                await a.until_idle()
        stay.call.cancel()
        gate.go.set()
        await a.until_idle()
        if who == "both":
            moving.close()
        elif moving.calls:
            if stage == "sending":
                await b.until(lambda load: load.transferring == 0)
            moving.calls[0].cancel()
        await all_idle(p, a, b)


def hold_commits(worker: Worker) -> Any:  # noqa: ANN401  # of no use but to be there
    """Its transfers never end."""
    sender: Any = worker.server.node.sender
    send = sender.send

    async def unconfirmed(progress: Any, ticket: Any, address: str) -> Any:  # noqa: ANN401
        progress._confirmed.clear()
        return await send(progress, ticket, address)

    sender.send = unconfirmed
    return sender


async def test_the_target_dies_in_the_middle_and_the_answer_goes_on_or_elsewhere() -> None:
    async with three(prefix_cache=False) as (p, a, b), running_worker("decode") as dying:
        gate = StepGate(a)
        moving = Moving(p, prompt_of(10), sampling(NUM_TOKENS))
        stay, _ = await parked_after(moving, a, gate, 5)
        moving.note(stay)
        _, ticket = await moving.ticket(dying)
        address = dying.address
        await dying.server.stop(0)
        await moving.move(stay, ticket, address)
        async with asyncio.timeout(WAIT_S):
            event = await stay.read()
        assert event.WhichOneof("event") == "move_failed"
        assert not event.move_failed.refused
        onward, _ = await moving.moved(stay, b)
        await onward.to_the_end()
        moving.note(onward)
        assert moving.tokens == p.model.expected(prompt_of(10), NUM_TOKENS)
        await all_idle(p, a, b)


async def test_a_draining_worker_moves_its_answers_and_is_idle() -> None:
    async with three() as (p, a, b):
        moving = Moving(p, prompt_of(10), sampling(200))
        stay = await moving.begin(a)
        draining = asyncio.create_task(a.server.drain(WAIT_S))
        await stay.pause()
        assert await stay.parked() is not None
        onward, _ = await moving.moved(stay, b)
        assert await draining, "it had work left"
        await onward.to_the_end()
        moving.note(onward)
        assert moving.tokens == p.model.expected(prompt_of(10), 200)
        await all_idle(p, a, b)


async def test_wrong_commands_are_refused_by_name() -> None:
    async with running_pair() as pair:
        for command, message in (
            ({"pause": worker_pb2.Pause(answer=3, number=1)}, "pause.answer is 3"),
            ({"move": worker_pb2.Move(number=1)}, "move.ticket.key is of another request"),
            (
                {"move": worker_pb2.Move(number=1, ticket=ticket_of("r"))},
                "move.decode_address is empty",
            ),
            (
                {
                    "move": worker_pb2.Move(
                        number=1, ticket=ticket_of("r"), decode_address="a" * 1_000_000
                    )
                },
                "move.decode_address has 1000000 characters, limit 300",
            ),
        ):
            gate = StepGate(pair.d)
            gate.arm(3)
            moving = Moving(pair.p, prompt_of(10), sampling(NUM_TOKENS))
            stay = await moving.begin(pair.d)
            await gate.until_inside()
            await stay.command(**command)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stay.to_the_end()
            gate.go.set()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in (raised.value.details() or "")
        await pair.until_idle()


def ticket_of(request_id: str) -> worker_pb2.KvTicket:
    return worker_pb2.KvTicket(key=worker_pb2.AttemptKey(request_id=request_id))
