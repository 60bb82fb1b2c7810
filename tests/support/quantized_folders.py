"""Quantised Hugging Face folders for tests, packed number by number from known integers.

Written from the formats' descriptions, one value at a time, and sharing nothing with the readers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_llama_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

IN_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Integers:
    """A matrix [N, K] as integers: w = scale * (q - zero), q and zero unsigned."""

    q: np.ndarray  # [N, K]
    zeros: np.ndarray  # [N, G]
    scales: Tensor  # [N, G] fp16
    group_of_column: np.ndarray  # [K]

    def weight(self) -> Tensor:
        """[N, K] fp32; exact, as eleven bits of a scale times eight fit into fp32's 24."""
        wide = self.q.astype(np.int64) - self.zeros[:, self.group_of_column]
        scales = self.scales.double().numpy()[:, self.group_of_column]
        return torch.from_numpy(wide * scales).float()


def draw(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group_size: int, *, symmetric: bool
) -> Integers:
    """Random integers over their whole range, group_size -1 for one group a row."""
    rows, width = shape
    size = width if group_size == -1 else group_size
    groups = -(-width // size)
    top = 2**bits
    zeros = rng.integers(0, top, (rows, groups))
    zeros[0, 0], zeros[-1, -1] = 0, top - 1  # the ends of the range
    if symmetric:
        zeros[:] = top // 2
    scales = torch.from_numpy(rng.uniform(0.5, 1.5, (rows, groups)) * 0.4 / top).half()
    return Integers(rng.integers(0, top, shape), zeros, scales, np.arange(width) // size)


def pack(numbers: np.ndarray, bits: int, axis: int) -> Tensor:
    """32 / bits neighbours along `axis` in an int32, the first in the lowest bits."""
    moved = np.moveaxis(numbers, axis, 0).astype(np.uint64)
    per_word = 32 // bits
    words = np.zeros((-(-moved.shape[0] // per_word), *moved.shape[1:]), dtype=np.uint64)
    for index in range(moved.shape[0]):
        words[index // per_word] |= moved[index] << np.uint64(bits * (index % per_word))
    packed = np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(packed))


def pack_awq(numbers: np.ndarray) -> Tensor:
    """[R, N] to [R, N / 8]: nibble i of a word holds number AWQ_ORDER[i] of the eight."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint64)
    for word in range(words.shape[1]):
        for nibble, output in enumerate(AWQ_ORDER):
            column = numbers[:, 8 * word + output].astype(np.uint64)
            words[:, word] |= column << np.uint64(4 * nibble)
    return torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32).view(np.int32)))


def gptq_parts(integers: Integers, bits: int, *, version: int = 1) -> dict[str, Tensor]:
    """What AutoGPTQ stores for a layer."""
    zeros = (integers.zeros - (1 if version == 1 else 0)) % 2**bits
    return {
        "qweight": pack(integers.q.T, bits, 0),
        "qzeros": pack(zeros.T, bits, 1),
        "scales": integers.scales.t().contiguous(),
        "g_idx": torch.from_numpy(integers.group_of_column.astype(np.int32)),
    }


def awq_parts(integers: Integers) -> dict[str, Tensor]:
    """What AutoAWQ stores for a layer."""
    return {
        "qweight": pack_awq(integers.q.T),
        "qzeros": pack_awq(integers.zeros.T),
        "scales": integers.scales.t().contiguous(),
    }


def ct_parts(
    integers: Integers, bits: int, *, packed: bool, symmetric: bool, tensor: bool = False
) -> dict[str, Tensor]:
    """What compressed-tensors stores for a layer."""
    middle = 2 ** (bits - 1)
    parts = {"weight_scale": integers.scales[:1, 0].clone() if tensor else integers.scales}
    if packed:
        parts["weight_packed"] = pack(integers.q, bits, 1)
        parts["weight_shape"] = torch.tensor(integers.q.shape)
    else:
        parts["weight"] = torch.from_numpy((integers.q - middle).astype(np.int8))
    if not symmetric:
        parts["weight_zero_point"] = (
            pack(integers.zeros, bits, 0)
            if packed
            else torch.from_numpy((integers.zeros - middle).astype(np.int8))
        )
    return parts


def quantized_folder(
    folder: Path,
    make: Callable[[Integers], dict[str, Tensor]],
    config: dict[str, Any],
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    change: Callable[[Integers], Integers] = lambda integers: integers,
    head: bool = False,
    **model: Any,  # noqa: ANN401  # LlamaConfig's fields
) -> tuple[Path, dict[str, Tensor]]:
    """A tiny Llama of which every linear layer is quantised.

    Returns the folder, and the tensors of the same model unquantised: the oracle.
    """
    make_llama_folder(folder, **model)
    file = folder / "model.safetensors"
    plain: dict[str, Tensor] = load_file(file)
    rng = np.random.default_rng(0)
    stored: dict[str, Tensor] = {}
    for name, tensor in sorted(plain.items()):
        stem = name.removesuffix(".weight")
        if not (stem.endswith(IN_LAYER) or (head and stem == "lm_head")):
            stored[name] = tensor
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        integers = change(draw(rng, shape, bits, group_size, symmetric=symmetric))
        plain[name] = integers.weight()
        stored |= {f"{stem}.{suffix}": part for suffix, part in make(integers).items()}
    save_file(stored, file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return folder, plain


DOWN = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def ct(form: str, *, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:  # noqa: ANN401  # settings of any type
    settings = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def gptq_folder(folder: Path, *, bits: int = 4, version: int = 1, **options: Any) -> Any:  # noqa: ANN401  # of quantized_folder
    config = GPTQ | {"bits": bits, "group_size": options.get("group_size", 32)}
    config |= {"sym": options.get("symmetric", False)}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return quantized_folder(
        folder, lambda i: gptq_parts(i, bits, version=version), config, bits=bits, **options
    )
