"""Requests that nobody should send, some thousands: each is served, or refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from request_fuzz import FAIR, RequestFuzz, fuzz
from router_service import ask, check_whole, collect
from text_service import TextService

from legato.protos import generation_pb2

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NUM_REQUESTS = 2000


def test_the_requests_reach_every_field_and_repeat_with_their_seed() -> None:
    first, again, other = RequestFuzz(1), RequestFuzz(1), RequestFuzz(2)
    made = [first.next() for _ in range(500)]
    assert made == [again.next() for _ in range(500)]
    assert made != [other.next() for _ in range(500)]
    seen: set[str] = set()
    num_malformed = 0
    for data in made:
        message = generation_pb2.GenerateRequest()
        try:
            message.ParseFromString(data)
        except Exception:  # of protobuf's implementation
            num_malformed += 1
            continue
        seen |= {field.name for field, _ in message.ListFields()}
        seen |= {f"sampling.{field.name}" for field, _ in message.sampling.ListFields()}
    assert 10 < num_malformed < 250
    wanted = set(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    wanted |= {
        f"sampling.{f.name}" for f in generation_pb2.GenerateRequest().sampling.DESCRIPTOR.fields
    }
    assert seen >= wanted


async def test_each_is_served_or_refused_with_a_reason(tmp_path: Path) -> None:
    async with TextService(tmp_path) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            tally = await fuzz(channel, 7, NUM_REQUESTS)
        print(dict(tally.codes))
        assert tally.faults == []
        assert tally.codes.total() == NUM_REQUESTS
        assert tally.codes["INVALID_ARGUMENT"] > NUM_REQUESTS / 4
        assert tally.codes["OK"] > 50
        await service.settle()
        assert service.router.counters.failed == 0
        assert service.control.lost == []  # no worker was blamed
        whole = await collect(service, ask("hello", 4))  # type: ignore[arg-type]  # has a client, too
        check_whole(whole, "hello", 4)


async def test_a_fault_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("legato.cluster.request.check_sampling", broken)
    async with (
        TextService(tmp_path) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        tally = await fuzz(channel, 7, 60)
    assert grpc.StatusCode.INTERNAL not in FAIR
    assert any(fault.startswith("INTERNAL") for fault in tally.faults)
