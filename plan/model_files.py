"""read_model: the shape of a model from its files, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from legato.plan.model_cost import ModelCost, layer_weights
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import KvShape
from legato.worker.loading import DTYPES
from legato.worker.models.hf_config import model_config, read_json_object
from legato.worker.models.hf_dtype import declared_dtype
from legato.worker.weights.demo_model import DEMO_MODEL
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.source import resolve_model

if TYPE_CHECKING:
    import torch

    from legato.worker.models.config import ModelConfig

# Bytes of a weight of a layer's matrices; the head stays in the dtype.
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5 + 4 / 64}  # a scale and a zero for 64
WEIGHTS = ("auto", *_QUANTIZED_BYTES)


@dataclass(frozen=True)
class ModelShape:
    """What a worker would hold of it."""

    config: ModelConfig
    dtype: str
    cost: ModelCost
    embedding_bytes: int  # that no step reads whole; 0 where it is the head too


def read_model(
    source: str, dtype: str = "auto", weights: str = "auto", kv_cache: str = "auto"
) -> ModelShape:
    """Of a folder with config.json, a config.json alone, a .gguf file, or `demo`.

    Raises:
        ValueError: there is none, or it is of a kind that Legato does not serve; a folder whose
            own weights are quantised, of which config.json does not tell the bytes.
    """
    config, native = _read(source)
    chosen = native if dtype == "auto" else DTYPES[dtype]
    worker = WorkerConfig(model=source, role="decode", kv_cache=kv_cache, kv_memory_fraction=1.0)
    shape = KvShape.of(config, worker, chosen)
    matrices = config.num_layers * layer_weights(config)
    head = config.hidden_size * config.vocab_size
    of_layer = _QUANTIZED_BYTES.get(weights, chosen.itemsize)
    weight_bytes = round(matrices * of_layer) + head * chosen.itemsize
    name = str(chosen).removeprefix("torch.")
    embedding_bytes = 0 if config.tie_word_embeddings else head * chosen.itemsize
    cost = ModelCost.of(config, weight_bytes, shape.bytes_per_token)
    return ModelShape(config, name, cost, embedding_bytes)


def _read(source: str) -> tuple[ModelConfig, torch.dtype]:
    path = Path(source).expanduser()
    if source != DEMO_MODEL and not path.exists():
        raise ValueError(
            f"model: no such folder or file: {source!r}; give a folder, its config.json, a .gguf "
            "file or demo: a plan downloads nothing"
        )
    file = path / "config.json" if path.is_dir() else path
    if source != DEMO_MODEL and file.suffix == ".json":
        values = read_json_object(file)
        if "quantization_config" in values:
            raise ValueError(
                f"{file}: the weights are quantised, and it does not tell their bytes: plan with "
                "a profile of it (`legato profile`)"
            )
        config = model_config(values, str(file))
        native = declared_dtype(values, str(file))
        return config, native or DTYPES["bfloat16"]
    checkpoint = open_checkpoint(resolve_model(source))
    return checkpoint.config, checkpoint.native_dtype
