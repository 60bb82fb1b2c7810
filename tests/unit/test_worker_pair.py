"""Prefill, hand-off and decode between two workers, with a model that sees every lost row."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import VOCAB_SIZE, fake_config
from worker_pair import Attempt, OpenPrefill, Pair, running_pair, running_worker, sampling

from legato.protos import common_pb2, worker_pb2


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % VOCAB_SIZE for i in range(length)]


async def test_answers_equal_the_reference_across_block_and_chunk_edges() -> None:
    async with running_pair(d={"block_size": 6, "num_blocks": 64}) as pair:
        for length in (1, 3, 4, 5, 8, 9, 13, 15, 16, 17, 33):
            prompt = prompt_of(length)
            answer = await Attempt(pair, prompt, sampling(18)).run()
            assert answer == pair.p.model.expected(prompt, 18), length
        await pair.until_idle()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_n_tokens_cost_one_prefill_and_n_minus_1_decode_forwards(max_tokens: int) -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(10), sampling(max_tokens))
        assert await attempt.run() == pair.p.model.expected(prompt_of(10), max_tokens)
        assert attempt.first is not None
        assert attempt.first.prefill_forwards == 1
        await pair.until_idle()
        p, d = pair.p.load(), pair.d.load()
        assert (p.prefill_steps, p.prefill_tokens) == (1, 10)
        assert (d.decode_steps, d.decode_tokens) == (max_tokens - 1, max_tokens - 1)
        assert p.kv_transfers_completed == (max_tokens > 1)
        row_bytes = 2 * 3 * 2 * 4 * 4
        assert p.kv_bytes_sent == d.kv_bytes_received == (10 * row_bytes if max_tokens > 1 else 0)


async def test_the_last_tokens_kv_is_never_written() -> None:
    async with running_pair() as pair:
        await Attempt(pair, prompt_of(6), sampling(3)).run()  # 6 + 3 - 1 rows: two blocks exactly
        await pair.until_idle()
        written = int((pair.d.server.node.cache.layers[0].k.abs().sum((1, 2)) > 0).sum())
        assert written == 8


async def test_streams_share_decode_batches_and_keep_their_own_answers() -> None:
    async with running_pair() as pair:
        prompts = [prompt_of(5 + i, salt=i) for i in range(8)]
        attempts = [
            Attempt(pair, p, sampling(12), request_id=f"r{i}") for i, p in enumerate(prompts)
        ]
        pair.d.model.go.clear()  # until all have landed, so that they surely share steps
        runs = [asyncio.create_task(a.run()) for a in attempts]
        await pair.d.until(lambda load: load.kv_transfers_completed == 8)
        pair.d.model.go.set()
        answers = await asyncio.gather(*runs)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == pair.p.model.expected(prompt, 12)
        assert pair.d.load().decode_tokens == 8 * 11
        assert pair.d.load().decode_steps < 8 * 11 / 2
        await pair.until_idle()


async def test_two_attempts_of_one_name_keep_apart() -> None:
    # As where a client goes on at another router before the first one's calls have ended.
    async with running_pair() as pair:
        prompts = [prompt_of(9, salt=1), prompt_of(9, salt=2)]
        attempts = [Attempt(pair, p, sampling(12), request_id="same") for p in prompts]
        pair.d.model.go.clear()
        runs = [asyncio.create_task(a.run()) for a in attempts]
        await pair.d.until(lambda load: load.kv_transfers_completed == 2)  # both at once
        runs[0].cancel()
        await asyncio.wait({runs[0]})
        pair.d.model.go.set()
        assert await runs[1] == pair.p.model.expected(prompts[1], 12)
        await pair.until_idle()


async def test_eos_stop_ids_min_tokens_and_ignore_eos() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(7)
        plain = pair.p.model.expected(prompt, 8)
        third = plain[2]
        assert third not in plain[:2]

        stopped = Attempt(pair, prompt, sampling(8), eos=[third])
        assert await stopped.run() == plain[:3]
        assert stopped.finish.finish_reason == common_pb2.FINISH_REASON_STOP

        by_id = Attempt(pair, prompt, sampling(8, stop_token_ids=[third]))
        assert await by_id.run() == plain[:3]

        ignoring = Attempt(pair, prompt, sampling(8, ignore_eos=True), eos=[third])
        assert await ignoring.run() == plain
        assert ignoring.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH

        both = Attempt(
            pair, prompt, sampling(8, ignore_eos=True, stop_token_ids=[third]), eos=[third]
        )
        assert await both.run() == plain[:3]

        held = Attempt(pair, prompt, sampling(8, min_tokens=5), eos=[third])
        answer = await held.run()
        assert len(answer) >= 5
        assert third not in answer[:5]

        first = Attempt(pair, prompt, sampling(8), eos=[plain[0]])
        assert await first.run() == plain[:1]
        assert first.first is not None
        assert first.first.answers[0].finish_reason == common_pb2.FINISH_REASON_STOP
        await pair.until_idle()


async def test_a_replay_goes_on_where_the_first_attempt_stopped() -> None:
    async with running_pair() as pair:
        prompt = prompt_of(9)
        plain = pair.p.model.expected(prompt, 10)
        again = Attempt(pair, prompt, sampling(10), attempt=1, emitted=plain[:4])
        assert await again.run() == plain
        last = Attempt(pair, prompt, sampling(10), attempt=2, emitted=plain[:9])
        assert await last.run() == plain
        await pair.until_idle()


async def test_kv_beyond_every_message_limit_arrives_in_pieces() -> None:
    # 3 layers x 400 tokens x 32 KiB = 37.5 MiB: many times 4 MiB, and above the 16 MiB limit.
    config = fake_config(num_kv_heads=8, head_dim=512)
    async with running_pair(config=config, p={"num_blocks": 101}, d={"num_blocks": 104}) as pair:
        prompt = prompt_of(400)
        answer = await Attempt(pair, prompt, sampling(3)).run()
        assert answer == pair.p.model.expected(prompt, 3)
        assert pair.d.load().kv_bytes_received == 3 * 400 * 32 * 1024
        await pair.until_idle()


@pytest.mark.parametrize("length", [12, 40])  # below and above one prefill chunk
async def test_a_full_decode_pool_deadlocks_nobody(length: int) -> None:
    blocks = -(-length // 4)
    rows = length + 19
    async with running_pair(
        p={"num_blocks": 4 * blocks}, d={"num_blocks": 2 * -(-rows // 4)}
    ) as pair:
        prompts = [prompt_of(length, salt=i) for i in range(24)]
        attempts = [
            Attempt(pair, p, sampling(20), request_id=f"r{i}") for i, p in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(a.run() for a in attempts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == pair.p.model.expected(prompt, 20)
        await pair.until_idle()


async def test_the_same_id_twice_gives_two_independent_answers() -> None:
    async with running_pair() as pair:
        prompts = [prompt_of(9, salt=1), prompt_of(11, salt=2)]
        answers = await asyncio.gather(*(Attempt(pair, p, sampling(16)).run() for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == pair.p.model.expected(prompt, 16)
        await pair.until_idle()


async def test_logprobs_come_with_every_token() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(5), sampling(2, logprobs=1))
        await attempt.run()
        assert attempt.first is not None
        assert attempt.first.answers[0].token.logprobs.top[0].logprob == -0.5
        assert attempt.finish.tokens[0].HasField("logprobs")
        await pair.until_idle()


async def test_a_request_that_can_never_fit_is_refused_at_once_by_both_pools() -> None:
    async with running_pair(p={"num_blocks": 4}, d={"num_blocks": 4}) as pair:
        edge = Attempt(pair, prompt_of(12), sampling(5))  # 16 rows: the pool exactly
        assert await edge.run() == pair.p.model.expected(prompt_of(12), 5)
        over = Attempt(pair, prompt_of(12), sampling(6))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await over.reserve_once()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "17" in (refused.value.details() or "")
        long = Attempt(pair, prompt_of(17), sampling(1))
        long.start_prefill()
        with pytest.raises(grpc.aio.AioRpcError) as too_long:
            await long.first_token()
        assert too_long.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await pair.until_idle()


async def refusal(pair: Pair, request: worker_pb2.PrefillRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await OpenPrefill(pair.p, request).read()
    return refused.value.code(), refused.value.details() or ""


async def test_sick_requests_fail_alone_naming_the_field() -> None:
    nan, inf = float("nan"), float("inf")
    async with running_pair() as pair:
        good = Attempt(pair, prompt_of(5), sampling(2)).prefill_request
        cases: list[tuple[str, worker_pb2.PrefillRequest]] = []

        def case(named: str, **fields: object) -> None:
            request = good()
            for name, value in fields.items():
                if name == "sampling":
                    request.sampling.CopyFrom(value)  # type: ignore[arg-type]  # a message
                elif isinstance(value, list):
                    request.ClearField(name)  # type: ignore[arg-type]  # a field's name
                    getattr(request, name).extend(value)
                else:
                    setattr(request, name, value)
            cases.append((named, request))

        case("token_ids", token_ids=[])
        case("token_ids", token_ids=[1, 2, 3, 4, VOCAB_SIZE])
        case("token_ids", token_ids=[1, 2, 3, 4, -1])
        case("eos_token_ids", eos_token_ids=[2**31 - 1])
        case("num_prompt_tokens", num_prompt_tokens=6)
        case("num_prompt_tokens", num_prompt_tokens=0)
        case("max_tokens", num_prompt_tokens=3)  # two emitted of two
        case("context", sampling=sampling(508))
        case("sampling.stop_token_ids", sampling=sampling(2, stop_token_ids=[VOCAB_SIZE]))
        case("sampling.logit_bias", sampling=sampling(2, logit_bias={VOCAB_SIZE: 1.0}))
        case("sampling.logit_bias", sampling=sampling(2, logit_bias={1: nan}))
        for name, value in [
            ("temperature", nan),
            ("temperature", inf),
            ("temperature", -1.0),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("top_k", -1),
            ("min_p", nan),
            ("repetition_penalty", 0.0),
            ("presence_penalty", 2.5),
            ("frequency_penalty", -inf),
            ("seed", -1),
            ("max_tokens", 0),
            ("min_tokens", 3),
            ("logprobs", 21),
        ]:
            case(f"sampling.{name}", sampling=sampling(**{"max_tokens": 2, name: value}))
        unset = sampling(2)
        unset.ClearField("top_k")
        case("sampling.top_k", sampling=unset)
        for named, request in cases:
            code, details = await refusal(pair, request)
            assert (code, named in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        for request_id in ("", "x" * 10_000):
            request = good()
            request.key.request_id = request_id
            assert (await refusal(pair, request))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert pair.p.load().prefill_tokens == 0
        assert await Attempt(pair, prompt_of(5), sampling(16)).run() == pair.p.model.expected(
            prompt_of(5), 16
        )
        await pair.until_idle()


async def test_the_wrong_role_is_refused() -> None:
    async with running_pair() as pair:
        attempt = Attempt(pair, prompt_of(5), sampling(2))
        swapped = Attempt(Pair(pair.d, pair.p), prompt_of(5), sampling(2))
        with pytest.raises(grpc.aio.AioRpcError) as decode:
            await swapped.reserve_once()
        call = OpenPrefill(pair.d, attempt.prefill_request())
        with pytest.raises(grpc.aio.AioRpcError) as prefill:
            await call.read()
        assert decode.value.code() is prefill.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running_pair() as pair:
        running = Attempt(pair, prompt_of(6), sampling(30))
        pair.d.model.go.clear()
        run = asyncio.create_task(running.run())
        await pair.d.until(lambda load: load.running == 1)
        await pair.d.control.Drain(worker_pb2.DrainRequest(), timeout=10)
        await pair.d.control.Drain(worker_pb2.DrainRequest(), timeout=10)
        new = Attempt(pair, prompt_of(6), sampling(2), request_id="new")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await new.reserve_once()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert not await pair.d.server.drain(0.05)
        pair.d.model.go.set()
        assert await run == pair.p.model.expected(prompt_of(6), 30)
        assert await pair.d.server.drain(10)
        await pair.until_idle()
        await pair.p.control.Drain(worker_pb2.DrainRequest(), timeout=10)
        code, _ = await refusal(pair, new.prefill_request())
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_watch_load_reports_now_on_change_and_at_least_each_half_second() -> None:
    async with running_worker("decode") as worker:
        identity = await worker.control.GetIdentity(worker_pb2.GetIdentityRequest(), timeout=10)
        assert identity.worker_id == worker.server.worker_id
        assert identity.kv_layout.dtype == "float32"
        watch = worker.control.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=20)
        first = await watch.read()
        assert first.phase == common_pb2.WORKER_PHASE_READY
        assert first.load.free_blocks == first.load.total_blocks == identity.total_blocks
        again = await watch.read()  # nothing changed: the half second's
        assert (again.phase, again.load) == (first.phase, first.load)
        assert first.prefix_changes.reset
        assert not again.HasField("prefix_changes")
        attempt = Attempt(Pair(worker, worker), prompt_of(6), sampling(3))
        await attempt.reserve_once()
        changed = await watch.read()
        while changed.load.reserved_blocks == 0:
            changed = await watch.read()
        assert changed.load.reserved_blocks == 2
        attempt.close()
        watch.cancel()
