"""Loss of what steers a service: its controller, a router, Ray's head, its owner."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest
from raw_client import BlockingRawClient, RawClient
from ray_head import ray_head
from served import END_TIMEOUT_S, Served, legato, runs
from tiny_models import make_llama_folder

from legato.protos import common_pb2, generation_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.integration

NUM_STREAMS = 50 if os.environ.get("LEGATO_FAULT_CASES") == "full" else 20
NUM_TOKENS = 1200
WAIT_S = 90.0
SMALL = ("--kv-memory", "96MiB", "--threads", "1")
PROMPTS = [f"prompt number {number}" for number in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "tiny"
    return make_llama_folder(folder, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    words = ("--model", str(model), "--routers", "2", "--decode", "2", *SMALL)
    with Served(log, *words) as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[list[int]]:
    """What each prompt's answer is."""
    return asyncio.run(ask_all(served.address.split(",")))


async def ask_all(
    addresses: Sequence[str],
    while_running: Callable[[], None] = lambda: None,
    prompts: Sequence[str] = PROMPTS,
) -> list[list[int]]:
    """Streams over all routers in turn; `while_running` is called, in a thread, when each of them
    has begun and none has ended.
    """
    clients = [RawClient(address) for address in addresses]
    num_begun, num_ended = 0, 0
    begun = asyncio.Event()

    async def ask(client: RawClient, text: str) -> list[int]:
        nonlocal num_begun, num_ended
        request = generation_pb2.GenerateRequest(
            text=text,
            sampling=common_pb2.SamplingParams(
                max_tokens=NUM_TOKENS, temperature=0.8, seed=7, ignore_eos=True
            ),
        )
        token_ids: list[int] = []
        async for response in client.generate(request, timeout_s=WAIT_S):
            if not response.HasField("delta"):
                continue
            if not token_ids:
                num_begun += 1
                if num_begun == len(prompts):
                    begun.set()
            assert response.delta.token_offset == len(token_ids), "a token lost or doubled"
            token_ids += response.delta.token_ids
        num_ended += 1
        return token_ids

    async def disturb() -> None:
        await asyncio.wait_for(begun.wait(), WAIT_S)
        assert num_ended == 0, f"{num_ended} streams were over: too little load"
        await asyncio.to_thread(while_running)

    try:
        calls = (ask(clients[i % len(clients)], text) for i, text in enumerate(prompts))
        *answers, _ = await asyncio.gather(*calls, disturb())
    finally:
        for client in clients:
            await client.close()
    return [answer for answer in answers if answer is not None]


def actor_processes(served: Served, name: str) -> list[psutil.Process]:
    """Those that run."""
    served.note_descendants()
    return [p for p in {*served.descendants} if runs(p) and name in command_of(p)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def pool_sizes(client: BlockingRawClient) -> list[tuple[int, int]]:
    """(live, ready) of each pool."""
    return [(len(pool.workers), pool.ready) for pool in client.status().pools]


def worker_pids(client: BlockingRawClient) -> dict[str, int]:
    return {w.worker_id: w.pid for pool in client.status().pools for w in pool.workers}


def test_no_request_notices_that_the_controller_is_killed(
    served: Served, undisturbed: list[list[int]]
) -> None:
    first, second = served.address.split(",")
    (controller,) = actor_processes(served, "ControllerActor")
    with BlockingRawClient(first) as client:
        before = worker_pids(client)

        def kill() -> None:
            controller.kill()

        def is_back() -> bool:
            return [pool.target for pool in client.status().pools] == [1, 2]

        assert asyncio.run(ask_all((first, second), kill)) == undisturbed
        wait_until(lambda: not runs(controller) and is_back(), "the controller did not come back")
        assert worker_pids(client) == before, "what ran was to be taken over"
        assert client.status().router.moved == 0
        assert client.scale({"decode": 3}) == {"prefill": 1, "decode": 3}
        wait_until(lambda: pool_sizes(client) == [(1, 1), (3, 3)], "it did not scale out")
        assert client.scale({"decode": 2}) == {"prefill": 1, "decode": 2}
        wait_until(lambda: pool_sizes(client) == [(1, 1), (2, 2)], "it did not scale in")


def test_a_worker_that_dies_while_there_is_no_controller_is_replaced(
    served: Served, undisturbed: list[list[int]]
) -> None:
    with BlockingRawClient(served.address.split(",")[1]) as client:
        before = worker_pids(client)
        victim = client.status().pools[1].workers[0]

        def kill() -> None:
            for controller in actor_processes(served, "ControllerActor"):
                controller.kill()
            os.kill(victim.pid, signal.SIGKILL)

        assert asyncio.run(ask_all(served.address.split(","), kill)) == undisturbed
        wait_until(
            lambda: (
                pool_sizes(client) == [(1, 1), (2, 2)]
                and victim.worker_id not in worker_pids(client)
            ),
            "the dead worker was not replaced",
        )
        assert len(worker_pids(client).keys() - before.keys()) == 1


def test_a_killed_router_comes_back_and_the_other_serves_on(
    served: Served, undisturbed: list[list[int]]
) -> None:
    addresses = served.address.split(",")
    with BlockingRawClient(addresses[0]) as first, BlockingRawClient(addresses[1]) as second:
        router, _ = actor_processes(served, "RouterActor")
        ports = {c.laddr.port for c in router.net_connections("tcp") if c.status == "LISTEN"}
        lost, kept = (
            (first, second) if int(addresses[0].split(":")[1]) in ports else (second, first)
        )
        assert lost is first or int(addresses[1].split(":")[1]) in ports
        serves_on = addresses[1] if lost is first else addresses[0]
        assert asyncio.run(ask_all([serves_on], router.kill)) == undisturbed
        assert kept.status().ready
        lost.wait_ready(WAIT_S)
        assert asyncio.run(ask_all(addresses)) == undisturbed
        assert lost.status().router.completed == NUM_STREAMS // 2, "its counts begin anew"
    assert "serves again" in served.output


def test_stop_at_any_router_ends_the_service(served: Served) -> None:
    # The last one of those that share it.
    served.note_descendants()
    ended = legato("stop", "--address", served.address.split(",")[1])
    assert (ended.returncode, ended.stdout) == (0, "stopped\n")
    assert served.process.wait(END_TIMEOUT_S) == 0
    assert served.survivors(10) == []
    assert "Traceback" not in served.output


def test_streams_run_on_and_new_ones_start_when_rays_head_is_lost(
    model: Path, tmp_path: Path
) -> None:
    words = ("--model", str(model), "--decode", "2", *SMALL)
    with Served(tmp_path / "log", *words) as service, BlockingRawClient(service.address) as client:
        folder = service.temp_folder()
        prompts = PROMPTS[:8]
        alone = asyncio.run(ask_all([service.address], prompts=prompts))
        head = next(p for p in service.descendants if p.name() == "gcs_server")
        victim = client.status().pools[1].workers[0]

        def kill() -> None:
            head.kill()
            wait_until(lambda: "Ray's head" in service.output, "nothing was said")
            os.kill(victim.pid, signal.SIGKILL)  # its streams move; nobody comes in its place

        assert asyncio.run(ask_all([service.address], kill, prompts)) == alone
        assert asyncio.run(ask_all([service.address], prompts=prompts)) == alone
        wait_until(
            lambda: pool_sizes(client) == [(1, 1), (1, 1)], "the dead worker is still told of"
        )
        decode = client.status().pools[1]
        assert "1 of 2 ready" in decode.message
        assert "Ray's head (gcs_server) does not answer" in decode.message
        with pytest.raises(grpc.RpcError, match="Ray's head"):
            client.scale({"decode": 3})
        service.note_descendants()
        ended = legato("stop", "--address", service.address)
        assert (ended.returncode, ended.stdout) == (0, "stopped\n")
        assert service.process.wait(END_TIMEOUT_S) == 0
        assert service.survivors(10) == []
    assert not folder.exists()
    assert "Traceback" not in service.output


def test_nothing_is_left_in_a_cluster_when_the_owner_is_killed(model: Path, tmp_path: Path) -> None:
    env = {"RAY_AUTH_MODE": "disabled"}
    with ray_head(tmp_path) as ray_address:
        words = (
            "--model",
            str(model),
            "--ray-address",
            ray_address,
            "--worker-cpus",
            "0.4",
            *SMALL,
        )
        with Served(tmp_path / "log", *words, "--decode", "1", env=env) as service:
            with BlockingRawClient(service.address) as client:
                pids = set(worker_pids(client).values())
            namespace = {p.pid: p for p in psutil.process_iter() if p.pid in pids}
            nodes = {p.parent() for p in namespace.values()}  # raylets, whose children actors are
            actors = [
                child
                for node in nodes
                if node is not None
                for child in node.children()
                if re.search("Actor|legato", command_of(child))
            ]
            assert len(actors) == 4, "two workers, a router, a controller"
            service.process.kill()
            service.process.wait()
            started_s = time.monotonic()
            wait_until(lambda: not any(map(runs, actors)), "something was left", 30)
            print(f"nothing left after {time.monotonic() - started_s:.1f} s")
