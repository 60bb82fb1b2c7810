"""Attempt, Target, Running: what a fake worker keeps of a call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from legato.protos import worker_pb2


@dataclass
class Attempt:
    """One Decode call."""

    reserve: worker_pb2.Reserve
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: set[int] = field(default_factory=set)
    num_tokens: dict[int, int] = field(default_factory=dict)  # by answer, of this attempt
    pauses: dict[int, int] = field(default_factory=dict)  # moves by answer, not resumed
    parked: set[int] = field(default_factory=set)
    moves: dict[int, worker_pb2.Move] = field(default_factory=dict)

    def num_blocks(self, block_size: int) -> int:
        """As long as the KV that it holds; full blocks of the hand-off are shared."""
        rows, num_answers = len(self.reserve.token_ids), self.reserve.num_answers
        shared = rows // block_size if num_answers > 1 else 0
        ends = [rows + 1] * num_answers
        for answer, count in self.num_tokens.items():
            ends[answer] = rows + max(1, count)
        return shared + sum(-(-end // block_size) - shared for end in ends)


@dataclass
class Target:
    """Where the KV of a Prefill call is to go."""

    ticket: worker_pb2.KvTicket
    address: str
    seen: list[worker_pb2.Retarget]
    num_retargets: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> None:
        async for command in commands:
            self.seen.append(command.retarget)
            self.ticket = command.retarget.ticket
            self.address = command.retarget.decode_address
            self.num_retargets += 1
            self.changed.set()


@dataclass
class Running:
    """One answer of a Decode call."""

    index: int  # of its next token
    seed: int
    forwards: int = 0
    batch: list[worker_pb2.SampledToken] = field(default_factory=list)
