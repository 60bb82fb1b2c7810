from __future__ import annotations

import pytest

from legato.cluster.node_fit import NodeView, find_node, holders, never_fits, too_many, waits_for
from legato.cluster.resource_demand import parse_demand
from legato.cluster.role_change import UnknownWorkerError


def node(
    node_id: str,
    total: dict[str, float],
    free: dict[str, float] | None = None,
    **labels: str,
) -> NodeView:
    return NodeView(node_id, "127.0.0.1:1", total, total if free is None else free, labels)


GPU_NODE = node("g", {"CPU": 8, "GPU": 2, "memory": 32e9}, {"CPU": 3, "memory": 32e9}, zone="a")
CPU_NODE = node("c", {"CPU": 64, "memory": 256e9}, {"CPU": 1, "memory": 1e9}, zone="b")
BOTH = (GPU_NODE, CPU_NODE)


@pytest.mark.parametrize(
    ("text", "able"),
    [
        ("CPU=8", ["g", "c"]),
        ("CPU=9", ["c"]),
        ("CPU=8,GPU=2", ["g"]),
        ("CPU=9,GPU=1", []),  # each on one node, but not on the same
        ("memory=33GB", ["c"]),
        ("label:zone=a", ["g"]),
        ("label:zone=!a", ["c"]),
        ("label:zone=in(a,b)", ["g", "c"]),
        ("label:rack=!x", ["g", "c"]),
        ("fast_gpu=1", []),
    ],
)
def test_who_can_hold_a_worker(text: str, able: list[str]) -> None:
    assert [one.node_id for one in holders(parse_demand(text), BOTH)] == able


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("GPU=3", "which needs GPU=3: the most on any node is GPU=2"),
        (
            "GPU=4,fast_gpu=1",
            "which needs GPU=4, fast_gpu=1: the most on any node is GPU=2, fast_gpu=0",
        ),
        ("memory=1TB", "which needs memory=1000GB: the most on any node is memory=256GB"),
        ("label:zone=z", "which needs label:zone=z: none has label:zone=z"),
        ("CPU=9,GPU=1", "which needs CPU=9, GPU=1: none has all of it at once"),
    ],
)
def test_what_no_node_can_ever_hold_is_said(text: str, told: str) -> None:
    demand = parse_demand(text)
    sentence = f"no node of the cluster can hold a decode worker, {told}"
    assert never_fits("decode", demand, BOTH) == sentence
    assert waits_for("decode", demand, BOTH) == f"waiting for a node: {sentence}"


def test_what_is_waited_for_is_said_and_nothing_where_there_is_room() -> None:
    def told(text: str) -> str:
        assert never_fits("prefill", parse_demand(text), BOTH) == ""
        return waits_for("prefill", parse_demand(text), BOTH)

    assert told("CPU=3") == ""
    assert told("CPU=1,memory=1GB") == ""
    asks = "waiting for room: a prefill worker needs"
    assert told("CPU=4") == f"{asks} CPU=4; the most free on one node is CPU=3 of 8"
    assert told("CPU=1,GPU=1") == f"{asks} GPU=1; the most free on one node is GPU=0 of 2"
    # What is free on a node that can never hold it helps nothing.
    assert told("CPU=2,memory=64GB") == (
        f"{asks} CPU=2, memory=64GB; the most free on one node is CPU=1 of 64, memory=1GB of 256GB"
    )


def test_what_is_free_on_two_nodes_is_not_free_at_once() -> None:
    nodes = (
        node("a", {"CPU": 4, "GPU": 1}, {"CPU": 4}),
        node("b", {"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 1}),
    )
    told = waits_for("decode", parse_demand("CPU=2,GPU=1"), nodes)
    assert told == "waiting for room: no node has CPU=2, GPU=1 free at once"


def test_sums_over_one_machine() -> None:
    one = (node("one", {"CPU": 4, "GPU": 1}),)
    half, whole = parse_demand("CPU=1,GPU=0.5"), parse_demand("CPU=3")
    assert too_many({"prefill": (1, half), "decode": (1, half)}, one) == ""
    assert too_many({"prefill": (1, half), "decode": (1, whole)}, one) == ""
    assert too_many({"prefill": (1, half), "decode": (2, half)}, one) == (
        "3 workers need GPU=1.5 together: this machine has GPU=1"
    )
    # Ray counts in ten-thousandths: three thirds are a whole.
    third = parse_demand("GPU=0.3333")
    assert too_many({"prefill": (1, third), "decode": (2, third)}, one) == ""


NAMED = [
    NodeView("a", "10.0.0.1:7001", {}, {}, {}, "one"),
    NodeView("b", "10.0.0.2:7001", {}, {}, {}, "two"),
    NodeView("c", "10.0.0.3:7001", {}, {}, {}, "two"),
]


def test_a_node_is_found_by_address_or_host_name() -> None:
    assert [find_node(NAMED, name).node_id for name in ("10.0.0.3", "one")] == ["c", "a"]
    with pytest.raises(ValueError, match=r"'two', limit .* names 10\.0\.0\.2, 10\.0\.0\.3"):
        find_node(NAMED, "two")
    with pytest.raises(UnknownWorkerError, match=r"host name '10\.0\.0'; there are 10\.0\.0\.1, "):
        find_node(NAMED, "10.0.0")
    with pytest.raises(ValueError, match="node is empty"):
        find_node(NAMED, "")
