"""A hand-off is cancelled in its middle and its blocks go to another request at once: what comes
late, or with an old epoch, never reaches them.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import google_crc32c
import grpc
import pytest
from fake_engine import FakeModel, fake_config
from link_proxy import LINK, LinkProxy, rows_of
from worker_pair import Attempt, Pair, running_pair, sampling

from legato.protos.kv_transfer_pb2 import KvAnswer, KvFrame, KvReceipt, KvRows
from legato.worker.handoff.frames import RowsFrame, RowsPrefix, header_checksum

if TYPE_CHECKING:
    from legato.protos import worker_pb2

RUNS = int(os.environ.get("LEGATO_LATE_ROWS_RUNS", "60"))
CONFIG = fake_config(num_layers=4)
MODEL = FakeModel(CONFIG)
NUM_TOKENS = 16
D_BLOCKS = 26  # of 4 rows: room for one of the prompts, and not for two


def prompt_of(length: int, salt: int) -> list[int]:
    return [(i * 37 + salt * 101 + 5) % 320 for i in range(length)]


async def handed_over(pair: Pair, attempt: Attempt, address: str) -> None:
    await attempt.reserve()
    attempt.start_prefill(address)
    await attempt.first_token()
    await attempt.start_decode()


async def solo_tokens(attempt: Attempt) -> list[int]:
    event = await attempt.handoff()
    assert event.WhichOneof("event") == "handoff_done", event
    await attempt.finish_all()
    [tokens] = attempt.answers.values()
    return tokens


class RawLink:
    """A sender of the test's own."""

    def __init__(self, pair: Pair, hello: bytes) -> None:
        self._call: Any = pair.d.channel.stream_stream(LINK)(timeout=20)
        self._hello = hello
        self._sequence = 0

    async def begin(self) -> None:
        frame = KvFrame.FromString(self._hello)
        frame.hello.ClearField("memory")  # rows come in the frames
        await self._call.write(frame.SerializeToString())
        assert (await self._answer()).WhichOneof("answer") == "welcome"

    async def rows(self, header: KvRows, data: bytes) -> KvReceipt:
        """Well formed in all but what the header says."""
        self._sequence += 1
        sent = KvRows()
        sent.CopyFrom(header)
        sent.sequence = self._sequence
        sent.ClearField("crc32c")
        sent.header_crc32c = header_checksum(sent)
        prefix = RowsPrefix.of(sent, len(data))
        message = bytearray(prefix.num_bytes)
        message[len(prefix.head) :] = data
        prefix.write(memoryview(message), google_crc32c.extend(sent.header_crc32c, data))
        await self._call.write(bytes(message))
        return (await self._answer()).receipt

    async def _answer(self) -> KvAnswer:
        while True:
            message = await self._call.read()
            assert message is not grpc.aio.EOF, await self._call.details()
            answer = KvAnswer.FromString(message)
            if answer.WhichOneof("answer") != "beat":
                return answer

    def close(self) -> None:
        self._call.cancel()


def rows_of_ticket(
    proxy: LinkProxy, ticket: worker_pb2.KvTicket, row_bytes: int
) -> list[tuple[KvRows, bytes]]:
    """Headers, and bytes as many as are due: the rows themselves where they are in the frames."""
    found = []
    for frame in map(rows_of, proxy.frames):
        header = frame.header if isinstance(frame, RowsFrame) else frame
        if header is None or header.epoch != ticket.epoch:
            continue
        header.ClearField("rows")
        size = header.num_layers * header.num_tokens * row_bytes
        data = bytes(frame.data) if isinstance(frame, RowsFrame) else b"\x41" * size
        assert len(data) == size
        found.append((header, data))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_lane", ["grpc", "auto"])
async def test_rows_of_a_cancelled_transfer_never_reach_the_next_owner(
    kv_lane: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CHUNK_BYTES", "SLOT_BYTES"):
        monkeypatch.setattr(f"legato.worker.handoff.lanes.{name}", 1024)
    lane = {"kv_lane": kv_lane}
    row_bytes = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    reused_blocks = refused = late = 0
    async with running_pair(
        config=CONFIG, p={"num_blocks": 256, **lane}, d={"num_blocks": D_BLOCKS, **lane}
    ) as pair:
        hello = b""
        for run in range(RUNS):
            first = Attempt(
                pair, prompt_of(70, 2 * run), sampling(NUM_TOKENS), request_id=f"a{run}"
            )
            second_prompt = prompt_of(66, 2 * run + 1)
            second = Attempt(pair, second_prompt, sampling(NUM_TOKENS), request_id=f"b{run}")
            async with LinkProxy(pair.d.address) as proxy:
                proxy.gate_at = 3 + run % 9  # hello, open, then rows
                await handed_over(pair, first, proxy.address)
                async with asyncio.timeout(10):
                    while len(proxy.frames) <= proxy.gate_at:  # noqa: ASYNC110  # no event tells
                        await asyncio.sleep(0.001)
                assert first.ticket is not None
                old_ticket = pair.d.server.node.tickets.find(first.ticket.epoch)
                assert old_ticket is not None
                assert old_ticket.lease is not None
                old_blocks = set(old_ticket.lease.blocks)
                header, data = rows_of_ticket(proxy, first.ticket, row_bytes)[-1]
                hello = proxy.frames[0]
                was_refused = pair.d.load().kv_chunks_refused
                first.close()
                # The other takes the blocks, while frames of the first are still on their way.
                going = asyncio.create_task(handed_over(pair, second, pair.d.address))
                proxy.gate.set()
                await going
                assert second.ticket is not None
                ticket = pair.d.server.node.tickets.find(second.ticket.epoch)
                if ticket is not None and ticket.lease is not None:
                    reused_blocks += bool(old_blocks & set(ticket.lease.blocks))
                raw = RawLink(pair, hello)
                await raw.begin()
                receipt = await raw.rows(header, data)
                refused += receipt.status == KvReceipt.STATUS_REFUSED
                tokens = await solo_tokens(second)
                assert tokens == MODEL.expected(second_prompt, NUM_TOKENS), f"run {run}"
                raw.close()
                second.close()
                # What was held back went on to the receiver, which had closed the ticket by then.
                late += pair.d.load().kv_chunks_refused - was_refused > 1
            await pair.until_idle()
    print(f"{kv_lane}: {RUNS} runs, {reused_blocks} took over blocks, {late} with late rows")
    assert refused == RUNS
    assert reused_blocks > RUNS // 2, "the second hardly ever took a block of the first"
    assert late > RUNS // 2, "hardly ever did anything come late"
