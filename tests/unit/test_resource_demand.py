from __future__ import annotations

import re

import pytest

from legato.cluster.resource_demand import ResourceDemand, label_matches, parse_demand


def test_every_form_is_read() -> None:
    text = (
        "CPU=4, GPU=0.5,memory=16GB,fast_gpu=1,node:10.0.0.1=0.01,label:zone=in(a, b),label:x/y=!c"
    )
    demand = parse_demand(text)
    assert demand == ResourceDemand(
        cpus=4,
        gpus=0.5,
        memory_bytes=16_000_000_000,
        custom=(("fast_gpu", 1), ("node:10.0.0.1", 0.01)),
        labels=(("zone", "in(a, b)"), ("x/y", "!c")),
    )
    assert demand.parts() == [
        "CPU=4",
        "GPU=0.5",
        "memory=16GB",
        "fast_gpu=1",
        "node:10.0.0.1=0.01",
        "label:zone=in(a, b)",
        "label:x/y=!c",
    ]


def test_none_is_not_the_same_as_nothing_said() -> None:
    demand = parse_demand("CPU=0,GPU=0")
    assert (demand.cpus, demand.gpus, demand.memory_bytes) == (0, 0, None)
    assert demand.amounts() == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must be a list such as CPU=4,"),
        (" , ", "'' must be name=amount"),
        ("GPU", "'GPU' must be name=amount"),
        ("CPU=1,", "'' must be name=amount"),
        ("cpu=4", "'cpu=4' names no resource of Ray's: did you mean CPU?"),
        ("gpus=1", "did you mean GPU?"),
        ("num_gpus=1", "did you mean GPU?"),
        ("Memory=1GB", "did you mean memory?"),
        ("CPU=-1", "'CPU=-1' must be an amount such as 1 or 0.5"),
        ("CPU=1e3", "must be an amount"),
        ("CPU=nan", "must be an amount"),
        ("CPU=", "must be an amount"),
        ("CPU=0.00001", "of at most 4 decimals"),
        ("CPU=1000000000", "below 10^9"),
        ("GPU=1.5", "must be a whole number of GPUs, or less than one"),
        ("fast=0", "'fast=0' must be more than 0"),
        ("CPU=1,GPU=1,CPU=2", "'CPU=2' names what an earlier part names"),
        ("label:zone=a,label:zone=b", "'label:zone=b' names what an earlier part names"),
        ("memory=0", "must be a size from 1 byte to 1 PiB"),
        ("memory=2000T", "must be a size"),
        ("memory=much", "must be a size"),
        ("object_store_memory=1GB", "asks for memory that workers do not use"),
        ("=1", "names a resource that Ray cannot have"),
        ("fast gpu=1", "names a resource that Ray cannot have"),
        ("a" * 129 + "=1", "names a resource that Ray cannot have"),
        ("label:=a", "must be label:key=value"),
        ("label:zone=", "must be label:key=value"),
        ("label:zone=in()", "must be label:key=value"),
        ("label:zone=a b", "must be label:key=value"),
        ("label:zone=in(a,b", "must be label:key=value"),
        ("label:" + "z" * 64 + "=a", "must be label:key=value"),
        ("\x1b[31mx=1", r"'\x1b[31mx=1' names a resource"),
        ("x" * 10_000, "must have at most 4096 characters, got 10000"),
        ("," * 4096, "'' must be name=amount"),
        ("(" * 4096, "must be name=amount"),
    ],
)
def test_what_is_wrong_is_named_with_the_rule(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        parse_demand(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        ("a", {"a"}),
        ("!a", {"b", "c", None}),
        ("in(a,b)", {"a", "b"}),
        ("in(a, b)", {"a", "b"}),
        ("!in(a,b)", {"c", None}),
    ],
)
def test_labels_match_as_ray_matches_them(condition: str, matching: set[str | None]) -> None:
    values: tuple[str | None, ...] = ("a", "b", "c", None)
    assert {value for value in values if label_matches(value, condition)} == matching
