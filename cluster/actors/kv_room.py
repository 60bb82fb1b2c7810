"""check_room: what a model and this machine say against options, before Ray is started for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from legato.cluster.errors import WrongInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.config import EngineOptions
    from legato.worker.models.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GPU_DRIVER = Path("/dev/nvidiactl")
_SCALE_BYTES = 4  # of a head, with 8 bits an element


def check_room(
    path: Path, engines: Iterable[EngineOptions], *, most_bytes: int | None = None
) -> None:
    """Needs no torch, and so tells the least that a block may take: what is enough by that, and too
    little by a worker's own account, the worker refuses. So it does with a model that is wrong.

    `most_bytes`: what workers on CPUs have at most, where that is known; see `own_memory`.

    Raises:
        WrongInputError: naming the option, its value and the limit.
    """
    engines = list(engines)
    for engine in engines:
        if engine.kv_memory_fraction is None and _is_beyond(engine, most_bytes):
            raise WrongInputError(
                f"--kv-memory is {engine.kv_memory_bytes} bytes, limit {most_bytes}: the memory of "
                "this machine; give a smaller --kv-memory"
            )
    model = _read(path)
    if model is None:
        return
    for engine in engines:
        asked = engine.context_length
        if asked is not None and asked > model.context_length:
            raise WrongInputError(
                f"--context-length is {asked}, limit {model.context_length}: the model's own"
            )
        if engine.kv_memory_fraction is not None:
            continue
        least = _least_block_bytes(model, engine)
        if engine.kv_memory_bytes < least:
            length = min(engine.context_length or model.context_length, model.context_length)
            blocks = -(-length // engine.block_size)
            raise WrongInputError(
                f"--kv-memory is {engine.kv_memory_bytes} bytes and holds no block of this model's "
                f"KV: one of {engine.block_size} tokens takes {least} or more, a context of "
                f"{length} tokens {blocks * least}"
            )


def own_memory(root: Path = Path("/")) -> int:
    """Bytes that a process of this machine may ever have, in use or not."""
    from legato.worker.memory_limits import host_total_bytes

    return host_total_bytes(root)


def _is_beyond(engine: EngineOptions, most_bytes: int | None) -> bool:
    if most_bytes is None or engine.kv_memory_bytes <= most_bytes:
        return False
    # What auto is, Ray says; where there is a GPU its memory is the limit, which the worker knows.
    return engine.device == "cpu" or (engine.device == "auto" and not _GPU_DRIVER.exists())


def _least_block_bytes(model: ModelConfig, engine: EngineOptions) -> int:
    head = model.head_dim + _SCALE_BYTES
    if engine.kv_cache == "auto":
        dtype = engine.dtype
        if dtype == "auto":  # the checkpoint's, but on a CPU
            dtype = "float32" if engine.device == "cpu" else "bfloat16"
        head = model.head_dim * _ITEM_BYTES[dtype]
    return engine.block_size * model.num_layers * 2 * model.num_kv_heads * head


def _read(path: Path) -> ModelConfig | None:
    """None where it cannot be read: the workers say why."""
    from legato.worker.models.gguf_config import gguf_model_config
    from legato.worker.models.hf_config import model_config, read_json_object
    from legato.worker.weights.gguf_header import GgufHeader

    try:
        if path.is_dir():
            file = path / "config.json"
            return model_config(read_json_object(file), str(file))
        header = GgufHeader.read(path)
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        return gguf_model_config(
            header.metadata,
            tensor_names=shapes.keys(),
            vocab_size=shapes["token_embd.weight"][0],
            rope_freqs=None,  # how positions turn is nothing to KV's size
            where=str(path),
        )
    except (ValueError, KeyError, OSError):
        return None
