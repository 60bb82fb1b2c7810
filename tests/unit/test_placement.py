from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from legato.cluster.actors.plans import WorkerPlan
from legato.cluster.actors.worker_actor import WorkerActor, worker_config
from legato.cluster.config import EngineOptions, ServiceConfig
from legato.cluster.node_fit import NodeView
from legato.cluster.placement import ClusterFacts, check_own, place
from legato.cluster.resource_demand import parse_demand
from legato.worker.config import WorkerConfig

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role


def facts(
    *nodes: NodeView,
    joined: bool = False,
    num_nodes: int = 1,
    num_gpus: float = 0.0,
    num_cores: int = 8,
) -> ClusterFacts:
    """Of `nodes`, or of so many of 64 CPUs with the GPUs shared among them."""
    if not nodes:
        nodes = tuple(
            node(f"n{i}", CPU=64, GPU=num_gpus / num_nodes, memory=1e12) for i in range(num_nodes)
        )
    return ClusterFacts(joined, nodes, num_cores)


def node(node_id: str, labels: dict[str, str] | None = None, **total: float) -> NodeView:
    return NodeView(node_id, "127.0.0.1:1", total, total, labels or {})


def config(*, device: str = "auto", threads: int | None = None, **fields: Any) -> ServiceConfig:  # noqa: ANN401  # fields of ServiceConfig
    engine = EngineOptions(device=device, num_threads=threads)
    return ServiceConfig(model="m", engine=engine, **fields)


@pytest.mark.parametrize(
    ("given", "joined", "num_nodes", "host"),
    [
        ("auto", False, 1, "127.0.0.1"),
        ("auto", True, 1, "127.0.0.1"),
        ("auto", True, 2, None),  # each node's own
        ("192.0.2.7", True, 2, "192.0.2.7"),
    ],
)
def test_host(given: str, joined: bool, num_nodes: int, host: str | None) -> None:
    placement = place(config(worker_host=given), facts(joined=joined, num_nodes=num_nodes))
    assert {one.host for one in placement.values()} == {host}


@pytest.mark.parametrize(
    ("device", "given", "num_gpus", "expected"),
    [
        ("auto", None, 0, ("cpu", 0)),
        ("auto", None, 2, ("cuda", 1)),
        ("auto", None, 1, ("cuda", 0.5)),
        ("auto", 0.0, 2, ("cpu", 0)),
        ("auto", 0.25, 1, ("cuda", 0.25)),
        ("cpu", None, 2, ("cpu", 0)),
        ("cuda", None, 2, ("cuda", 1)),
        ("cuda", 0.5, 1, ("cuda", 0.5)),
    ],
)
def test_gpus(
    device: str, given: float | None, num_gpus: float, expected: tuple[str, float]
) -> None:
    placement = place(config(device=device, worker_gpus=given), facts(num_gpus=num_gpus))
    assert {(one.device, one.demand.gpus) for one in placement.values()} == {expected}


def test_what_a_ray_of_our_own_can_never_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a prefill worker, which needs GPU=1: .*is GPU=0\. Ask"):
        place(config(device="cuda"), facts())
    with pytest.raises(ValueError, match="2 workers need GPU=2 together: this machine has GPU=1"):
        place(config(device="cuda"), facts(num_gpus=1))
    with pytest.raises(ValueError, match=r"a decode worker, which needs memory=2000GB: "):
        place(config(decode_resources=parse_demand("memory=2TB")), facts())
    check_own(config(decode_resources=parse_demand("CPU=1,GPU=1,memory=2TB")))
    told = r"--decode-resources: no node has fast_gpu=1, label:zone=a: a Ray of our own"
    with pytest.raises(ValueError, match=told):
        check_own(config(decode_resources=parse_demand("CPU=1,fast_gpu=1,label:zone=a")))
    with pytest.raises(ValueError, match="2 workers need CPU=96 together: this machine has CPU=64"):
        place(config(worker_cpus=48), facts())
    # A cluster may grow; there the controller says what it waits for.
    joined = place(config(device="cuda"), facts(joined=True))
    assert [one.demand.gpus for one in joined.values()] == [1, 1, 1]


def test_cpus_are_asked_of_a_shared_cluster_only() -> None:
    def cpus(one: ServiceConfig, *, joined: bool) -> list[float | None]:
        return [p.demand.cpus for p in place(one, facts(joined=joined)).values()]

    assert cpus(config(), joined=False) == [0, 0, 0]
    assert cpus(config(), joined=True) == [1, 1, 1]
    assert cpus(config(worker_cpus=4), joined=True) == [4, 4, 4]
    decode = parse_demand("CPU=2,memory=4GB")
    assert cpus(config(worker_cpus=4, decode_resources=decode), joined=True) == [4, 2, 4]
    assert not config().asks_cpus
    assert config(worker_cpus=1).asks_cpus
    assert config(decode_resources=decode).asks_cpus


def test_each_pool_has_its_own_kind_of_machine() -> None:
    gpus = node("a", {"zone": "a"}, CPU=16, GPU=2)
    cpus = node("b", {"zone": "b"}, CPU=64)
    cluster = facts(gpus, cpus, joined=True)
    apart = place(
        config(
            prefill_workers=2,
            decode_workers=3,
            prefill_resources=parse_demand("label:zone=a"),
            decode_resources=parse_demand("CPU=8,label:zone=b"),
        ),
        cluster,
    )
    prefill, decode = apart["prefill"], apart["decode"]
    # Those on the machine without GPUs take nothing from those on the other.
    assert (prefill.device, prefill.demand.gpus, prefill.sharers) == ("cuda", 1, 1)
    assert (decode.device, decode.demand.gpus, decode.sharers) == ("cpu", 0, 3)
    assert (prefill.num_threads, decode.num_threads) == (1, 8)
    assert prefill.demand.labels == (("zone", "a"),)
    # GPU=0 keeps a pool off the GPUs that it could have, and the other pool has them all.
    mixed = place(config(decode_resources=parse_demand("GPU=0")), facts(num_gpus=1, joined=True))
    assert [(one.device, one.demand.gpus) for one in mixed.values()] == [
        *(("cuda", 1), ("cpu", 0), ("cuda", 1)),
    ]
    with pytest.raises(ValueError, match="--decode-resources GPU=0 with --device cuda"):
        place(config(device="cuda", decode_resources=parse_demand("GPU=0")), cluster)


def test_threads() -> None:
    assert place(config(decode_workers=3), facts(num_cores=8))["decode"].num_threads == 2
    assert place(config(decode_workers=3), facts(num_cores=2))["decode"].num_threads == 1
    assert place(config(threads=5), facts())["decode"].num_threads == 5
    assert place(config(worker_cpus=4), facts(joined=True, num_cores=64))["decode"].num_threads == 4


@pytest.mark.parametrize(
    ("options", "given", "sharers"),
    [
        ({}, {}, 2),
        ({"decode_workers": 3}, {}, 4),
        ({"decode_workers": 3}, {"joined": True, "num_nodes": 3}, 2),
        ({}, {"num_gpus": 2.0}, 1),
        ({}, {"num_gpus": 1.0}, 2),
        ({"decode_workers": 2}, {"num_gpus": 1.0}, 3),
        ({"worker_gpus": 2.0}, {"num_gpus": 4.0}, 1),
    ],
)
def test_workers_that_share_a_memory(
    options: dict[str, Any], given: dict[str, Any], sharers: int
) -> None:
    assert place(config(**options), facts(**given))["decode"].sharers == sharers


def test_a_worker_is_told_what_the_service_was() -> None:
    engine = EngineOptions(
        kv_memory_fraction=0.6,
        swap_memory_bytes=0,
        kv_lane="grpc",
        dtype="float32",
        admission="reserve",
        admission_risk=0.25,
        kv_memory_bytes=4096,
        max_batch_size=3,
    )
    service = ServiceConfig(
        model="m", decode_workers=2, engine=engine, decode_dtype="bfloat16", decode_kv_cache="int8"
    )
    engines: dict[Role, EngineOptions] = {"prefill": engine, "decode": service.decode_engine()}
    plan = WorkerPlan("m", engines, place(service, facts()), spread=False)
    worker = worker_config("decode", plan)
    prefill = worker_config("prefill", plan)
    assert (prefill.dtype, prefill.kv_cache) == ("float32", "auto")
    assert (worker.dtype, worker.kv_cache) == ("bfloat16", "int8")
    assert replace(worker, role="prefill", dtype="float32", kv_cache="auto") == prefill
    assert replace(service, decode_dtype=None, decode_kv_cache=None).decode_engine() == engine
    assert worker.kv_memory_fraction == pytest.approx(0.2)  # of three on one machine
    assert (worker.kv_memory_bytes, worker.swap_memory_bytes) == (4096, 0)
    assert (worker.admission, worker.admission_risk) == ("reserve", 0.25)
    assert worker.kv_lane == "grpc"
    assert (worker.host, worker.num_threads, worker.max_batch_size) == ("127.0.0.1", 2, 3)
    # Whatever the service has a name for has the same name and default in a worker.
    names = {field.name for field in fields(EngineOptions)}
    assert names <= {field.name for field in fields(WorkerConfig)}
    assert all(getattr(WorkerConfig, n) == getattr(EngineOptions, n) for n in names)


@pytest.mark.parametrize(
    ("fraction", "last"), [(None, "weights 100 %"), (0.5, "measuring what a step takes")]
)
async def test_a_starting_worker_says_what_it_does(fraction: float | None, last: str) -> None:
    engine = EngineOptions(kv_memory_fraction=fraction)
    placement = place(ServiceConfig(model="m", engine=engine), facts())
    worker = worker_config("decode", WorkerPlan("m", {"decode": engine}, placement, spread=False))
    actor, said = WorkerActor(), []
    for num_read in (1, 2):
        actor._note_progress(worker, num_read, 2)
        said.append(await actor.loading())
    assert said == ["weights 50 %", last]
