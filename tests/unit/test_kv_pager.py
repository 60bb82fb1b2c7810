"""KvPager and WireFormat: rows from one pool's pages over the wire into another's."""

from __future__ import annotations

import asyncio
import threading

import google_crc32c
import pytest
import torch
from memory_checkpoint import MemoryCheckpoint
from paged_runner import PagedRunner
from tiny_models import make_model

from legato.cluster import config as cluster_config
from legato.kernels.kv_scatter import kv_scatter
from legato.worker import config as worker_config
from legato.worker.config import KV_WIRES, WorkerConfig
from legato.worker.kv.block_lease import BlockLease, LeaseReleasedError
from legato.worker.kv.block_pool import BlockPool
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.kv.pager import DamagedChunkError, KvPager
from legato.worker.kv.row_range import RowRange
from legato.worker.kv.wire import KV_WIRE_DTYPES, WireFormat
from legato.worker.models.build import build_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
# Of a wire, over the largest element of a head.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 253, "fp8": 2**-4}


def shape_of(dtype: torch.dtype, *, block_size: int = 4) -> KvShape:
    return KvShape(num_layers=2, num_kv_heads=3, head_dim=24, block_size=block_size, dtype=dtype)


class Side:
    """A pool of 40 tokens with a lease on all of it, in some order."""

    def __init__(self, shape: KvShape, blocks: list[int], wire: str = "same") -> None:
        self.cache = KvCache(shape, len(blocks), CPU)
        self.pool = BlockPool(len(blocks))
        self.pool.allocate(len(blocks))
        self.lease = BlockLease(self.pool, blocks)
        self.pager = KvPager(self.cache, WireFormat.of(shape, wire))
        size = shape.block_size
        self.slots = torch.tensor([b * size + i for b in blocks for i in range(size)])

    def fill(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = self.cache.shape
        for pages in self.cache.layers:
            size = (len(self.slots), shape.num_kv_heads, shape.head_dim)
            k, v = (torch.randn(size, generator=generator) for _ in range(2))
            kv_scatter(k, v, pages, self.slots)

    def values(self) -> torch.Tensor:
        """[layers, 2, 40, heads, head_dim] fp32, in the order of the tokens."""
        parts = []
        for pages in self.cache.layers:
            for rows, scales in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
                wide = rows.float() if scales is None else rows.float() * scales[..., None]
                parts.append(wide[self.slots])
        return torch.stack(parts).unflatten(0, (len(self.cache.layers), 2))


def sides(
    dtype: torch.dtype = torch.float32, other: torch.dtype | None = None, wire: str = "same"
) -> tuple[Side, Side]:
    """Of blocks of 4 and of 10 tokens; the first one is filled."""
    source = Side(shape_of(dtype), [5, 2, 7, 0, 9, 1, 3, 8, 4, 6], wire)
    target = Side(shape_of(other or dtype, block_size=10), [3, 0, 2, 1], wire)
    source.fill()
    return source, target


WHOLE = RowRange(0, 2, 0, 40, 0, 3)


async def transfer(source: Side, target: Side, rows: RowRange) -> None:
    data = memoryview(bytearray(source.pager.wire.num_bytes(rows)))
    crc = await source.pager.read(source.lease, rows, data, 5)
    assert crc == google_crc32c.extend(5, bytes(data))
    await target.pager.write(target.lease, rows, data, 5, crc)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_the_same_dtype_arrives_bit_for_bit_in_blocks_of_another_size(
    dtype: torch.dtype,
) -> None:
    source, target = sides(dtype)
    for rows in (
        RowRange(0, 2, 0, 7, 0, 3),
        RowRange(0, 1, 7, 33, 0, 3),
        RowRange(1, 1, 7, 33, 0, 2),
    ):
        await transfer(source, target, rows)
    await transfer(source, target, RowRange(1, 1, 7, 33, 2, 1))
    assert source.values().any()
    for here, there in zip(source.cache.layers, target.cache.layers, strict=True):
        for name in ("k", "v", "k_scale", "v_scale"):
            rows_here, rows_there = getattr(here, name), getattr(there, name)
            if rows_here is None:
                assert rows_there is None
                continue
            sent = rows_here.view(torch.uint8)[source.slots]
            assert torch.equal(sent, rows_there.view(torch.uint8)[target.slots])


@pytest.mark.parametrize("wire", KV_WIRE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_rows_are_converted_as_the_wire_says(dtype: torch.dtype, wire: str) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    source, target = sides(dtype, other, wire)
    await transfer(source, target, WHOLE)
    sent, landed = source.values(), target.values()
    largest = sent.abs().amax(-1, keepdim=True)
    rounding = ROUNDING[wire] + (2**-8 if other == torch.bfloat16 else 0)
    assert ((landed - sent).abs() <= largest * rounding).all()
    if dtype == torch.float32 and wire in ("float16", "int8", "fp8"):  # it is seen
        assert not torch.equal(landed, sent.to(other).float())


async def test_damage_is_seen_and_after_the_end_of_a_request_nothing_lands() -> None:
    source, target = sides()
    data = memoryview(bytearray(source.pager.wire.num_bytes(WHOLE)))
    crc = await source.pager.read(source.lease, WHOLE, data, 0)
    data[1000] ^= 1
    for damaged in (data, memoryview(bytes(data))):
        with pytest.raises(DamagedChunkError):
            await target.pager.write(target.lease, WHOLE, damaged, 0, crc)
    data[1000] ^= 1
    with pytest.raises(DamagedChunkError):
        await target.pager.write(target.lease, WHOLE, data, 1, crc)
    source.lease.release()
    target.lease.release()
    landed = target.values()
    data[2000] ^= 1
    with pytest.raises(LeaseReleasedError):
        await target.pager.write(target.lease, WHOLE, data, 0, crc)
    before = bytes(data)
    with pytest.raises(LeaseReleasedError):
        await source.pager.read(source.lease, WHOLE, data, 0)
    assert bytes(data) == before
    assert torch.equal(target.values(), landed)


async def test_what_does_not_fit_is_refused() -> None:
    source, _ = sides()
    size = source.pager.wire.num_bytes(WHOLE)
    for rows, num_bytes, message in (
        (WHOLE, size - 1, f"the buffer has {size - 1} bytes, the rows have {size}"),
        (RowRange(1, 2, 0, 40, 0, 3), size, "layers 1 to 3 are not within"),
        (RowRange(0, 2, 0, 40, 1, 3), size, "KV heads 1 to 4 are not within"),
        (RowRange(0, 2, -1, 40, 0, 3), size, "tokens -1 to 39 are no rows"),
        (RowRange(0, 2, 0, 0, 0, 3), size, "tokens 0 to 0 are no rows"),
        (RowRange(0, 2, 1, 40, 0, 3), size, "tokens 1 to 41 are not within .0, 40."),
    ):
        data = memoryview(bytearray(num_bytes))
        with pytest.raises(ValueError, match=message):
            await source.pager.read(source.lease, rows, data, 0)
        with pytest.raises(ValueError, match=message):
            await source.pager.write(source.lease, rows, data, 0, google_crc32c.value(bytes(data)))


async def test_after_a_cancellation_nobody_touches_the_buffer() -> None:
    source, _ = sides()
    data = memoryview(bytearray(source.pager.wire.num_bytes(WHOLE)))
    begun, go = threading.Event(), threading.Event()
    move = source.pager._rows.read

    def slow(*args: object) -> int:
        begun.set()
        assert go.wait(20)
        return move(*args)  # type: ignore[arg-type]  # passed on as they came

    source.pager._rows.read = slow  # type: ignore[method-assign]  # for the test
    running = asyncio.create_task(source.pager.read(source.lease, WHOLE, data, 0))
    await asyncio.to_thread(begun.wait, 20)
    waiting_data = memoryview(bytearray(len(data)))
    waiting = asyncio.create_task(source.pager.read(source.lease, WHOLE, waiting_data, 0))
    await asyncio.sleep(0)
    waiting.cancel()  # has not begun: it never does
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(3):
        running.cancel()
        done, _ = await asyncio.wait((running,), timeout=0.01)
        assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert any(data)
    data[:] = bytes(len(data))
    crc = await source.pager.read(source.lease, RowRange(0, 1, 0, 1, 0, 1), data[:192], 0)
    assert crc == google_crc32c.value(bytes(data[:192]))
    assert not any(data[192:])
    assert not any(waiting_data)
    source.lease.release()
    assert source.pool.usage().held == 0


def test_the_names_of_wires() -> None:
    assert worker_config.KV_WIRES == cluster_config.KV_WIRES == ("same", *KV_WIRE_DTYPES)
    for name in KV_WIRES:
        wire = WireFormat.of(shape_of(torch.float16), name)
        assert wire.name == name
        assert wire.dtype == KV_WIRE_DTYPES.get(name, torch.float16)
        quantized = name in ("int8", "fp8")
        head = 24 * wire.dtype.itemsize + (4 if quantized else 0)
        assert wire.num_bytes(RowRange(1, 1, 8, 5, 1, 2)) == 2 * 5 * 2 * head
    with pytest.raises(ValueError, match=r"kv_wire must be one of same, float32, .*, got 'int4'"):
        WireFormat.of(shape_of(torch.float32), "int4")
    with pytest.raises(ValueError, match=r"kv_wire must be one of same, float32, .*, got 'auto'"):
        WorkerConfig(model="m", role="decode", kv_wire="auto")


@pytest.mark.parametrize(("wire", "limit"), [("same", 0.0), ("int8", 0.08), ("fp8", 0.6)])
async def test_what_a_wire_does_to_the_answer(wire: str, limit: float) -> None:
    """Logits behind a prompt whose KV has come over the wire, over their spread."""
    llama = make_model("llama", num_hidden_layers=3, initializer_range=0.3)
    model = build_model(MemoryCheckpoint(llama), CPU, torch.float32)
    prompt = [(7 * i * i) % 256 for i in range(31)]
    alone, sender, receiver = (PagedRunner(model, block_size=4) for _ in range(3))
    alone.step({0: prompt})
    expected = alone.step({0: [9]})[0]
    sender.step({0: prompt})
    receiver.step({0: [0] * len(prompt)})
    shape = sender.cache.shape
    rows = RowRange(0, shape.num_layers, 0, len(prompt), 0, shape.num_kv_heads)
    pager = KvPager(sender.cache, WireFormat.of(shape, wire))
    data = memoryview(bytearray(pager.wire.num_bytes(rows)))
    lease, there = (BlockLease(BlockPool(1), side.blocks(0)) for side in (sender, receiver))
    crc = await pager.read(lease, rows, data, 0)
    await KvPager(receiver.cache, pager.wire).write(there, rows, data, 0, crc)
    error = (receiver.step({0: [9]})[0] - expected).abs().max() / expected.std()
    assert error <= limit
    assert (error > 0) == (wire != "same")
