"""PagedRows: rows of many layers to one buffer and back, in C and in torch, against plain torch."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass

import google_crc32c
import pytest
import torch
from kernel_paths import DEVICE, needs_native, use_path
from torch import Tensor

from legato.kernels.kv_pages import QUANTIZED_DTYPES, KvPages
from legato.kernels.kv_quantize import dequantize_rows, quantize_rows
from legato.kernels.kv_rows import PagedRows, rows_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, *QUANTIZED_DTYPES]
LAYERS, HEADS, BLOCK_SIZE = 3, 3, 4
BLOCKS = [5, 2, 7, 0, 9]
PATHS = [
    pytest.param("native", marks=needs_native),
    "portable",
    pytest.param(
        "device",
        marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no device")],
    ),
]


@dataclass(frozen=True)
class Place:
    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    head_start: int
    num_heads: int


ALL = Place(0, LAYERS, 0, 20, 0, HEADS)
PLACES = [
    ALL,
    Place(1, 1, 3, 9, 0, HEADS),
    Place(1, 2, 2, 15, 1, 1),
    Place(2, 1, 19, 1, 0, 2),
    Place(0, 2, 4, 4, 0, HEADS),
]


def make_layers(dtype: torch.dtype, head_dim: int, seed: int, path: str) -> list[KvPages]:
    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if path == "device" else "cpu"
    layers = []
    for _ in range(LAYERS):
        parts = []
        for _ in range(2):
            rows = torch.randn(40, HEADS, head_dim, generator=generator)
            rows *= torch.randn(40, HEADS, 1, generator=generator).exp()
            rows[11, 1] = 0.0
            parts.append(converted(rows, None, dtype))
        (k, k_scale), (v, v_scale) = parts
        layers.append(
            KvPages(
                k.to(device),
                v.to(device),
                None if k_scale is None else k_scale.to(device),
                None if v_scale is None else v_scale.to(device),
            )
        )
    return layers


def converted(
    rows: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if rows.dtype == dtype:
        return rows, scales
    wide = rows.float() if scales is None else dequantize_rows(rows, scales)
    return quantize_rows(wide, dtype) if dtype in QUANTIZED_DTYPES else (wide.to(dtype), None)


def slots_of(place: Place) -> list[int]:
    return [
        BLOCKS[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        for token in range(place.token_start, place.token_start + place.num_tokens)
    ]


def parts_of(pages: KvPages, place: Place) -> list[tuple[Tensor, Tensor | None]]:
    """K's and V's rows of the place and their scales, from one layer."""
    slots, heads = slots_of(place), slice(place.head_start, place.head_start + place.num_heads)
    return [
        (
            rows.cpu().view(torch.uint8)[slots, heads].view(rows.dtype),
            None if scales is None else scales.cpu()[slots, heads],
        )
        for rows, scales in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    ]


def expected_bytes(layers: list[KvPages], place: Place, dtype: torch.dtype) -> bytes:
    rows, scales = [], []
    for pages in layers[place.layer_start : place.layer_start + place.num_layers]:
        for part in parts_of(pages, place):
            new, new_scales = converted(*part, dtype)
            rows.append(raw(new))
            scales.append(b"" if new_scales is None else raw(new_scales))
    return b"".join(rows + scales)


def raw(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def everything(layers: list[KvPages]) -> list[bytes]:
    return [
        raw(part)
        for pages in layers
        for part in (pages.k, pages.v, pages.k_scale, pages.v_scale)
        if part is not None
    ]


def everything_but(place: Place, layers: list[KvPages]) -> list[bytes]:
    slots, heads = slots_of(place), slice(place.head_start, place.head_start + place.num_heads)
    others = []
    for i, pages in enumerate(layers):
        for part in (pages.k, pages.v, pages.k_scale, pages.v_scale):
            if part is not None:
                kept = part.cpu().view(torch.uint8).clone().view(*part.shape[:2], -1)
                if place.layer_start <= i < place.layer_start + place.num_layers:
                    kept[slots, heads] = 0
                others.append(raw(kept))
    return others


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kv_dtype", "dtype"), [*itertools.product(DTYPES, repeat=2)])
def test_rows_there_and_back(
    path: str, kv_dtype: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_path(path, monkeypatch)
    head_dim = 20  # a whole vector of C's and a part of one
    layers = make_layers(kv_dtype, head_dim, 1, path)
    source = PagedRows(layers, BLOCK_SIZE)
    for place in PLACES:
        size = rows_bytes(place, head_dim, dtype)
        memory = bytearray(size + 7)
        data = memoryview(memory)[7:]  # unaligned: rows begin anywhere in a message
        crc = source.read(BLOCKS, place, dtype, data, 77)
        assert bytes(data) == expected_bytes(layers, place, dtype)
        assert crc == google_crc32c.extend(77, bytes(data))
        assert memory[:7] == bytes(7)

        landed, before = (make_layers(kv_dtype, head_dim, 2, path) for _ in range(2))
        target = PagedRows(landed, BLOCK_SIZE)
        for damaged in (bytes(data), memoryview(bytearray(data))):
            assert not target.write(BLOCKS, place, dtype, memoryview(damaged), 77, crc ^ 1)
            assert everything_but(place, landed) == everything_but(place, before)
        sent = memoryview(bytes(data)) if place is ALL else data
        assert target.write(BLOCKS, place, dtype, sent, 77, crc)
        check_landed(landed, before, place, data, dtype)


def check_landed(
    landed: list[KvPages],
    before: list[KvPages],
    place: Place,
    data: memoryview,
    dtype: torch.dtype,
) -> None:
    """The rows are those of `data`, converted; everything else is what it was."""
    head_dim, kv_dtype = landed[0].head_dim, landed[0].dtype
    heads = (place.num_layers, 2, place.num_tokens, place.num_heads)
    count = place.num_layers * 2 * place.num_tokens * place.num_heads * head_dim
    copied = bytearray(data)
    rows = torch.frombuffer(copied, dtype=dtype, count=count).view(*heads, head_dim)
    scales = None
    if dtype in QUANTIZED_DTYPES:
        tail = bytearray(copied[count * dtype.itemsize :])
        scales = torch.frombuffer(tail, dtype=torch.float32).view(heads)
    slots = slots_of(place)
    heads_there = slice(place.head_start, place.head_start + place.num_heads)
    wanted = []
    for layer, pages in enumerate(before):
        parts = [[pages.k, pages.k_scale], [pages.v, pages.v_scale]]
        inside = place.layer_start <= layer < place.layer_start + place.num_layers
        for value, (old, old_scales) in enumerate(parts):
            if not inside:
                break
            assert old is not None
            i = layer - place.layer_start
            new, new_scales = converted(
                rows[i, value], None if scales is None else scales[i, value], kv_dtype
            )
            old.view(torch.uint8)[slots, heads_there] = new.view(torch.uint8).to(old.device)
            if old_scales is not None and new_scales is not None:
                old_scales[slots, heads_there] = new_scales.to(old.device)
        wanted.append(pages)
    assert everything(landed) == everything(wanted)


@pytest.mark.parametrize("path", PATHS)
def test_a_large_chunk_of_many_blocks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_path(path, monkeypatch)
    device = "cuda" if path == "device" else "cpu"
    k, v = torch.randn(2, 64 * 32, 4, 80).to(device)
    pages = KvPages(k, v)
    blocks = list(range(64))
    random.Random(2).shuffle(blocks)
    place = Place(0, 1, 37, 1900, 0, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        data = memoryview(bytearray(rows_bytes(place, 80, dtype)))
        crc = PagedRows([pages], 32).read(blocks, place, dtype, data, 0)
        assert crc == google_crc32c.value(bytes(data))
        slots = [blocks[t // 32] * 32 + t % 32 for t in range(37, 1937)]
        parts = [converted(rows[slots].cpu(), None, dtype) for rows in (k, v)]
        assert bytes(data) == b"".join(raw(rows) for rows, _ in parts) + b"".join(
            raw(scales) for _, scales in parts if scales is not None
        )


@pytest.mark.parametrize("path", PATHS)
def test_not_a_number_arrives_as_such(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_path(path, monkeypatch)
    for kv_dtype, dtype in itertools.product(DTYPES[:3], DTYPES):
        layers = make_layers(kv_dtype, 64, 1, path)
        for pages in layers:
            pages.v[BLOCKS[0] * BLOCK_SIZE, 1, 5] = torch.nan
        data = memoryview(bytearray(rows_bytes(ALL, 64, dtype)))
        PagedRows(layers, BLOCK_SIZE).read(BLOCKS, ALL, dtype, data, 0)
        landed = make_layers(kv_dtype, 64, 2, path)
        target = PagedRows(landed, BLOCK_SIZE)
        assert target.write(BLOCKS, ALL, dtype, data, 0, google_crc32c.value(bytes(data)))
        for pages in landed:
            assert pages.v[BLOCKS[0] * BLOCK_SIZE, 1, 5].isnan()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lands_is_what_was_checked(
    path: str, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread, as a broken sender would, writes into the memory all the time."""
    use_path(path, monkeypatch)
    device = "cuda" if path == "device" else "cpu"
    k, v = torch.zeros(2, 512, 4, 64, device=device, dtype=kv_dtype)
    target = PagedRows([KvPages(k, v)], 16)
    place, blocks = Place(0, 1, 0, 512, 0, 4), list(range(32))
    slot = torch.ones(2, 512, 4, 64)
    data = memoryview(slot.numpy()).cast("B")
    crc = google_crc32c.value(bytes(data))
    stop = threading.Event()

    def scribble() -> None:
        last = slot[1, 511]
        while not stop.is_set():
            for value in (2.0, 1.0):
                last.fill_(value)
                time.sleep(20e-6)  # lets the other have the interpreter

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        num_landed = 0
        for _ in range(2000):
            v.zero_()
            if target.write(blocks, place, torch.float32, data, 0, crc):
                num_landed += 1
                assert (v == 1.0).all()
    finally:
        stop.set()
        thread.join()
    assert num_landed > 0


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    layers, before = (make_layers(torch.float32, 6, 1, "native") for _ in range(2))
    rows = PagedRows(layers, BLOCK_SIZE)
    good = memoryview(bytearray(rows_bytes(ALL, 6, torch.float32)))
    wrong = [
        (Place(2, 2, 0, 20, 0, 3), "layers 2 to 4 are not within .0, 3."),
        (Place(-1, 3, 0, 20, 0, 3), "layers -1 to 2"),
        (Place(0, 3, 1, 20, 0, 3), "tokens 1 to 21 are not within .0, 20."),
        (Place(0, 3, 0, 0, 0, 3), "tokens 0 to 0"),
        (Place(0, 3, 0, 20, 1, 3), "KV heads 1 to 4 are not within .0, 3."),
        (Place(0, 3, 0, 19, 0, 3), "the buffer has 8640 bytes, the rows have 8208"),
    ]
    for place, message in wrong:
        with pytest.raises(ValueError, match=message):
            rows.read(BLOCKS, place, torch.float32, good, 0)
        with pytest.raises(ValueError, match=message):
            rows.write(BLOCKS, place, torch.float32, good, 0, google_crc32c.value(bytes(good)))
    assert not any(good)
    with pytest.raises(ValueError, match="into must be writable"):
        rows.read(BLOCKS, ALL, torch.float32, good.toreadonly(), 0)
    with pytest.raises(ValueError, match="must be contiguous"):
        rows.read(BLOCKS, ALL, torch.float32, memoryview(bytearray(2 * len(good)))[::2], 0)
    assert everything(layers) == everything(before)
