"""check_kv_memory: whether --kv-memory holds anything of a model, before Ray is started for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from legato.cluster.config import EngineOptions
    from legato.worker.models.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCALE_BYTES = 4  # of a head, with 8 bits an element


def check_kv_memory(path: Path, engines: Iterable[EngineOptions]) -> None:
    """Needs no torch, and so tells the least that a block may take: what is enough by that, and too
    little by a worker's own account, the worker refuses. So it does with a model that is wrong.

    Raises:
        ValueError: naming the option, its value and the least.
    """
    model: ModelConfig | None = None
    for engine in engines:
        if engine.kv_memory_fraction is not None:
            continue
        if model is None and (model := _read(path)) is None:
            return
        least = _least_block_bytes(model, engine)
        if engine.kv_memory_bytes < least:
            length = min(engine.context_length or model.context_length, model.context_length)
            blocks = -(-length // engine.block_size)
            raise ValueError(
                f"--kv-memory is {engine.kv_memory_bytes} bytes and holds no block of this model's "
                f"KV: one of {engine.block_size} tokens takes {least} or more, a context of "
                f"{length} tokens {blocks * least}"
            )


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
