"""Which safetensors files make up a model, and where each tensor lies in them."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from legato.worker.models.hf_config import read_json_object
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import bare, quoted
from legato.worker.weights.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
# The format allows 100 MB, whose parsing can take gigabytes. MAX_LAYERS layers take about 10 MB.
MAX_HEADER_BYTES = 16 << 20
MAX_NAME_BYTES = 255  # of a file, as file systems have it


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of the folder's model, from the headers alone.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, or disagrees with the index.
    """
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            raise CheckpointError(f"{path}: is not a file")
    if (folder / SINGLE_FILE).exists():  # before the index, as transformers has it
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return _read_shards(folder)
    raise _nothing_to_load(folder)


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file; its length is compared with what the header describes."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            raise CheckpointError(f"{file}: is truncated: only {size} bytes")
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: is no safetensors file: a header of {header_bytes} bytes, at most "
                f"{MAX_HEADER_BYTES} are allowed"
            )
        if LENGTH_BYTES + header_bytes > size:
            raise CheckpointError(
                f"{file}: is truncated: its header takes {header_bytes} bytes, the file {size}"
            )
        raw = opened.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        data = LENGTH_BYTES + header_bytes
        tensors = [_stored(file, name, entry, data) for name, entry in header.items()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: has a malformed header: {error}") from error
    described = max((tensor.stop for tensor in tensors), default=data)
    if size < described:
        raise CheckpointError(
            f"{file}: is truncated: its header describes {described} bytes, the file has {size}"
        )
    if size > described:
        raise CheckpointError(
            f"{file}: has {size - described} bytes that its header does not describe"
        )
    return tensors


def _stored(file: Path, name: str, entry: dict[str, object], data: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"tensor {bare(name)} is not described by dtype, shape and data_offsets")
    start, stop = offsets
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) or start > stop:
        raise ValueError(
            f"tensor {bare(name)} has shape {quoted(shape)} and data_offsets {quoted(offsets)}"
        )
    return StoredTensor(name, file, dtype, tuple(shape), data + start, data + stop)


def _read_shards(folder: Path) -> list[StoredTensor]:
    index = folder / INDEX_FILE
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    tensors: list[StoredTensor] = []
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: names {quoted(shard)}; a shard is a .safetensors file beside the index"
            )
        if len(shard.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
            raise CheckpointError(f"{index}: names a shard of more than {MAX_NAME_BYTES} bytes")
        if not (folder / shard).exists():
            raise CheckpointError(
                f"{folder / bare(shard)}: is missing, though {INDEX_FILE} names it; download it "
                "again"
            )
        tensors += read_header(folder / shard)

    found = {(tensor.name, tensor.file.name) for tensor in tensors}
    for name, shard in weight_map.items():
        if (name, shard) not in found:
            raise CheckpointError(
                f"{index}: tensor {bare(name)} is not in {bare(shard)}, where it should be"
            )
    for tensor in tensors:
        if weight_map.get(tensor.name) != tensor.file.name:
            raise CheckpointError(
                f"{tensor.file}: tensor {bare(tensor.name)} is here, but {INDEX_FILE} places it in "
                f"{bare(weight_map.get(tensor.name, 'no file'))}"
            )
    return tensors


def _nothing_to_load(folder: Path) -> CheckpointError:
    for suffixes, advice in (
        ((".gguf",), "give the path of the .gguf file itself"),
        (
            (".bin", ".pt", ".pth"),
            "convert them to safetensors; pickled weights are never loaded, as they can run code",
        ),
        ((".safetensors",), f"the weights must be called {SINGLE_FILE}, or come with an index"),
    ):
        names = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
        if names:
            return CheckpointError(
                f"{folder}: has no {SINGLE_FILE} and no {INDEX_FILE}, only {bare(names[0])}"
                f"{' and others' if len(names) > 1 else ''}: {advice}"
            )
    return CheckpointError(f"{folder}: has no weights: no {SINGLE_FILE} and no {INDEX_FILE}")
