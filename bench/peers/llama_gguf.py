"""A Llama in Hugging Face's form as a GGUF file, in bfloat16; needs gguf and numpy.

It has a vocabulary, which llama.cpp's server wants to have: what its words are does not matter, for
prompts are token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PRECISIONS = ("bf16",)
_SPECIAL = ("<unk>", "<s>", "</s>")
_NUM_BYTES = 256


def prepare(model: str, precision: str, work_dir: str) -> str:
    """A file in `work_dir`."""
    target = Path(work_dir) / f"{Path(model).name}-{precision}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        _write_gguf(Path(model), part)
        part.rename(target)
    return str(target)


def _write_gguf(folder: Path, target: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    _add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in _bfloat16_tensors(folder / "model.safetensors"):
        stem, _, suffix = name.rpartition(".")
        rows = values
        if stem.endswith("q_proj"):
            rows = _interleaved(values, heads)
        elif stem.endswith("k_proj"):
            rows = _interleaved(values, kv_heads)
        gguf_name = f"{names.get_name(stem)}.{suffix}"
        if values.ndim == 1:  # norms stay in float32
            writer.add_tensor(gguf_name, (rows.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(
                gguf_name, rows.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """In SentencePiece's form: special tokens, all bytes, then words that no text contains."""
    kinds = gguf.TokenType
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(_NUM_BYTES))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * _NUM_BYTES]
    tokens += [f"w{number}" for number in range(len(tokens), size)]
    types += [kinds.NORMAL] * (size - len(types))
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types(types[:size])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _bfloat16_tensors(path: Path) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """A safetensors file's tensors as uint16 (numpy has no bfloat16)."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors.append((name, data[start:end].view(np.uint16).reshape(entry["shape"])))
    return tensors


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """From halves that rotate together to pairs, as llama.cpp rotates."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)
