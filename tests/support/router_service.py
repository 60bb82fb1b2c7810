"""Service: a router over fake workers in one process, with the text side faked too."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fake_worker import SEED, FakeWorker, scripted_token
from raw_client import RawClient

from legato.cluster.config import RouterOptions
from legato.cluster.errors import invalid
from legato.cluster.request import RequestSpec
from legato.cluster.resumption import parse_resumption
from legato.cluster.role_change import RoleChange
from legato.cluster.router import Router
from legato.cluster.timings import Phase
from legato.protos import cluster_pb2, common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from legato.cluster.control_plane import Role
    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.router_load import RouterLoad


class FakeText:
    """One character a token."""

    name = "fake"
    eos_token_ids = (257,)
    has_chat_template = False

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


@dataclass(frozen=True)
class FakeDelta:
    text: str
    num_tokens_consumed: int
    stop: str | None


class FakeAnswerText:
    """Stop strings over one-character tokens; holds back what may become one."""

    def __init__(self, text: Any, stop: Sequence[str], min_tokens: int) -> None:  # noqa: ANN401
        self._stop, self._held = stop, ""
        self.stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> FakeDelta:
        out = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._held += chr(token_id)
            for stop in self._stop:
                if self._held.endswith(stop):
                    self.stop = stop
                    out, self._held = out + self._held[: -len(stop)], ""
                    return FakeDelta(out, count, stop)
            while self._held and not any(s.startswith(self._held) for s in self._stop):
                out, self._held = out + self._held[0], self._held[1:]
        return FakeDelta(out, len(token_ids), None)

    def finish(self) -> str:
        out, self._held = self._held, ""
        return out


def fake_parse(
    request: generation_pb2.GenerateRequest,
    text: Any,  # noqa: ANN401
    limits: ModelLimits,
) -> RequestSpec:
    prompt = tuple(request.token_ids.ids) or tuple(request.text.encode())
    if request.messages.messages:
        prompt = tuple("".join(message.content for message in request.messages.messages).encode())
    num_answers = request.n or 1
    resumed = parse_resumption(request, num_answers, limits.vocab_size)
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling if resumed is None else resumed.settle(request.sampling))
    prompt_logprobs = None
    if sampling.HasField("prompt_logprobs") and (resumed is None or not resumed.has_begun):
        prompt_logprobs = sampling.prompt_logprobs
    sampling.ClearField("prompt_logprobs")
    prompt_only = sampling.HasField("max_tokens") and sampling.max_tokens == 0
    sampling.max_tokens = max(1, sampling.max_tokens)
    if len(prompt) + sampling.max_tokens - 1 > limits.decode_kv_tokens and sampling.max_tokens > 1:
        raise invalid("prompt + max_tokens - 1 is more than the largest decode worker holds")
    return RequestSpec(
        request_id=request.request_id or f"made-{time.monotonic_ns()}",
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=tuple(sampling.stop),
        eos_token_ids=text.eos_token_ids,
        cache_salt=request.cache_salt,
        batch_priority=request.priority == common_pb2.PRIORITY_BATCH,
        num_answers=num_answers,
        resumed=resumed,
        prompt_logprobs=prompt_logprobs,
        prompt_only=prompt_only,
    )


class FakeControl:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, str]] = []
        self.is_away = False  # it restarts
        self.num_unheard = 0
        self.targets: dict[Role, int] = {"prefill": 1, "decode": 1}
        self.shutdowns: list[float] = []
        self.role_changes: list[tuple[str, Role]] = []
        self.refusal: ValueError | None = None  # of a change of role
        self.pools_delay_s = 0.0
        self.drained: list[str] = []
        self.told: list[cluster_pb2.PoolStatus] = []
        self.loads: list[RouterLoad] = []
        self.failing = False  # where it is told of load, or asked of the autoscaler
        self.num_failed = 0
        self.scale_refusal = ""
        self.autoscaler_told = cluster_pb2.AutoscalerStatus()

    async def pools(self) -> list[cluster_pb2.PoolStatus]:
        await asyncio.sleep(self.pools_delay_s)
        return self.told

    async def scale(self, targets: Mapping[Role, int]) -> Mapping[Role, int]:
        if self.is_away:
            raise ConnectionError("the controller is restarting; try again")
        if self.scale_refusal:
            raise ValueError(self.scale_refusal)
        self.targets.update(targets)
        return self.targets

    async def change_role(self, worker_id: str, role: Role) -> RoleChange:
        self.role_changes.append((worker_id, role))
        if self.refusal is not None:
            raise self.refusal
        return RoleChange(f"{worker_id}-in-full", self.targets)

    async def drain_worker(self, worker_id: str) -> str:
        self.drained.append(worker_id)
        if self.refusal is not None:
            raise self.refusal
        return f"{worker_id}-in-full"

    async def drain_node(self, node: str) -> list[str]:
        self.drained.append(node)
        if self.refusal is not None:
            raise self.refusal
        return [f"decode-1-on-{node}"]

    async def shutdown(self, drain_timeout_s: float) -> None:
        self.shutdowns.append(drain_timeout_s)

    async def report_lost(self, worker_id: str, reason: str) -> None:
        if self.is_away:
            self.num_unheard += 1
            raise ConnectionError("the controller is restarting; try again")
        self.lost.append((worker_id, reason))

    async def report_load(self, load: RouterLoad) -> None:
        if self.failing:
            self.num_failed += 1
            raise ConnectionError("the controller is gone")
        self.loads.append(load)

    async def autoscaler(self) -> cluster_pb2.AutoscalerStatus:
        if self.failing:
            raise ConnectionError("the controller is gone")
        return self.autoscaler_told


def fake_router(
    options: RouterOptions, control: FakeControl, started_at: float | None = None
) -> Router:
    """Not started."""
    return Router(
        options,
        FakeText(),  # type: ignore[arg-type]  # what the router uses of it
        control,
        model_name="fake-model",
        version="0",
        owner_pid=7,
        owner_host="here",
        started_at=started_at,
        parse=fake_parse,
        new_answer=FakeAnswerText,
    )


@asynccontextmanager
async def another_router(service: Service) -> AsyncIterator[tuple[Router, str]]:
    """A second one over the same workers, and its address."""
    router = fake_router(service.options, service.control)
    address = await router.start()
    try:
        await router.set_workers(service.endpoints)
        await until(lambda: router.ready)
        yield router, address
    finally:
        await router.stop()


class Service:
    """Use as an async context manager; `await settle()` proves that nothing is held."""

    def __init__(
        self,
        prefills: Sequence[FakeWorker],
        decodes: Sequence[FakeWorker],
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.prefills, self.decodes = list(prefills), list(decodes)
        self.control = FakeControl()
        # Whether the local way is the cheaper one is measured: off, unless the test is of it.
        options.setdefault("local_prefill_tokens", 0)
        self.options = RouterOptions(port=0, **options)

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    async def __aenter__(self) -> Service:
        self.router = fake_router(self.options, self.control)
        self.address = await self.router.start()
        self.client = RawClient(self.address)
        self.endpoints = [await worker.start() for worker in self.workers]
        await self.router.set_workers(self.endpoints)
        if self.prefills and self.decodes:
            await self.client.wait_ready(5)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.resume()
            worker.faults.hold_handoff = False
        await self.client.close()
        await self.router.stop()
        await asyncio.gather(*(worker.die() for worker in self.workers))

    async def settle(self) -> None:
        """Within a bound nobody holds anything: neither the workers nor the router's own books."""
        await until(
            lambda: (
                all(w.used_blocks == 0 and w.open_calls == 0 for w in self.workers)
                and self.router.num_in_flight == 0
                and self.router.admission.num_queued == 0
                and all(
                    v.used_blocks == 0 and v.backlog_tokens == 0 and not v.calls
                    for v in self.router.pool.views()
                )
            )
        )


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@dataclass
class Result:
    token_ids: list[int]
    text: str
    finish: generation_pb2.Finish


def ask(
    prompt: str,
    max_tokens: int,
    *,
    request_id: str = "",
    batch: bool = False,
    n: int | None = None,
    **sampling: Any,  # noqa: ANN401
) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        n=n,
        request_id=request_id,
        text=prompt,
        priority=common_pb2.PRIORITY_BATCH if batch else common_pb2.PRIORITY_INTERACTIVE,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, seed=SEED, **sampling),
    )


def expected(prompt: str, num_tokens: int, answer: int = 0) -> list[int]:
    """What the fake model says, as ids."""
    ids = list(prompt.encode())
    return [scripted_token(ids, index, SEED + answer) for index in range(num_tokens)]


async def collect(
    service: Service, request: generation_pb2.GenerateRequest, timeout_s: float | None = 20.0
) -> Result:
    """Reads the one answer to its end."""
    [result] = await collect_all(service, request, timeout_s)
    return result


async def collect_all(
    service: Service, request: generation_pb2.GenerateRequest, timeout_s: float | None = 20.0
) -> list[Result]:
    """Reads all answers to their ends; checks that the offsets have no gap, and that each ends
    once.
    """
    token_ids: dict[int, list[int]] = {index: [] for index in range(request.n or 1)}
    texts = dict.fromkeys(token_ids, "")
    finishes: dict[int, generation_pb2.Finish] = {}
    async for response in service.client.generate(request, timeout_s=timeout_s):
        index = response.index
        assert index in token_ids
        assert index not in finishes, "nothing comes after the finish"
        assert response.request_id
        if response.HasField("delta"):
            assert response.delta.token_offset == len(token_ids[index])
            token_ids[index] += response.delta.token_ids
            texts[index] += response.delta.text
        else:
            finishes[index] = response.finish
    assert finishes.keys() == token_ids.keys(), "each answer ends with a finish"
    for index, finish in finishes.items():
        assert finish.usage.completion_tokens == len(token_ids[index])
        assert finish.usage.prompt_tokens == len(request.text)
        phases = [getattr(finish.timings, phase.value) for phase in Phase]
        assert sum(phases) == finish.timings.total_s
    return [Result(token_ids[i], texts[i], finishes[i]) for i in token_ids]


def text_of(ids: Sequence[int]) -> str:
    """What the fake model's tokens spell."""
    return "".join(map(chr, ids))


def check_whole(result: Result, prompt: str, num_tokens: int, answer: int = 0) -> None:
    """The answer has all its tokens, and ends because they are all."""
    assert result.token_ids == expected(prompt, num_tokens, answer)
    assert result.text == text_of(result.token_ids)
    assert result.finish.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert result.finish.usage.seed == SEED + answer
