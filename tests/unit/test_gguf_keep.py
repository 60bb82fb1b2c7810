from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from paged_runner import PagedRunner
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_llama_folder

from legato.kernels.weight import QuantizedWeight
from legato.worker.models.build import build_model
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.gguf_blocks import KEPT_TYPES, read_blocks
from legato.worker.weights.matrix_form import MatrixForm
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
TOKENS = [(37 * i + 5) % 256 for i in range(21)]


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Any bits for the weights; scales that are finite, some of them negative or tiny."""
    rng = np.random.default_rng(0)
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    num_scales = 2 if kind == "Q4_1" else 1
    scales = rng.normal(size=(rows, blocks, num_scales)).astype(np.float16)
    scales[0, 0] = 6e-8  # the smallest fp16
    raw[:, :, : 2 * num_scales] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_blocks_are_bit_for_bit_what_gguf_makes_of_them(kind: str) -> None:
    raw = random_blocks(kind, 7, 5)
    found = read_blocks(torch.from_numpy(raw), kind)
    assert (found.bits, found.group_size, found.in_features) == (
        8 if kind == "Q8_0" else 4,
        32,
        160,
    )
    wanted = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
    assert torch.equal(found.dequantize(), wanted)


@pytest.mark.parametrize("kind", KEPT_TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    ggml_type = GGMLQuantizationType[kind]
    raw = random_blocks(kind, 64, 4)
    at = 2 if kind == "Q4_1" else 0
    raw[63, at : at + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    name = "blk.1.ffn_down.weight"
    file = write_gguf(
        tmp_path / "m.gguf",
        make_llama(),
        matrix_type=ggml_type,
        tensors={name: raw},
        raw_types={name: ggml_type},
    )
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor .*down_proj.* \({name}\) .*NaN"):
        open_checkpoint(file).quantized("model.layers.1.mlp.down_proj.weight", (64, 128))


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_every_matrix_is_kept_with_rows_in_our_order(tmp_path: Path, kind: str) -> None:
    """Q and K are permuted in the file: their rows must come back in the order of `tensor`."""
    file = write_gguf(tmp_path / "m.gguf", make_llama(), matrix_type=GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(file)
    assert (checkpoint.can_keep, checkpoint.auto_keeps) == (True, False)
    for name, shape in model_tensors(checkpoint.config):
        kept = checkpoint.quantized(name, shape)
        wanted = checkpoint.tensor(name, shape, torch.float32)
        assert (kept is None) == (len(shape) == 1)
        if kept is not None:
            assert torch.equal(kept.dequantize(), wanted), name


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative: kernels for quantised weights round the activations to 8 bits."""
    return float((found - wanted).norm() / wanted.norm())


def run(file: Path, weights: str) -> Tensor:
    checkpoint = open_checkpoint(file)
    model = build_model(checkpoint, CPU, torch.float32, form=MatrixForm(weights, checkpoint))
    return PagedRunner(model).step({0: TOKENS}, all_logits=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_kept_weights_give_the_logits_of_dequantised_ones(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    model = make_llama(tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "m.gguf", model, matrix_type=GGMLQuantizationType[kind])
    assert distance(run(file, "keep"), run(file, "auto")) < 0.05


def test_a_file_of_several_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """K of another type is kept beside Q and V; a Q5_0 matrix is dequantised, and said so."""
    mixed = {
        "blk.0.attn_k.weight": GGMLQuantizationType.Q8_0,
        "blk.0.attn_v.weight": GGMLQuantizationType.Q4_1,
        "blk.1.ffn_down.weight": GGMLQuantizationType.Q5_0,
        "blk.2.ffn_up.weight": GGMLQuantizationType.F32,
    }
    model = make_llama()
    tensors = {}
    for name, kind in mixed.items():
        elements, size = GGML_QUANT_SIZES[kind]
        rows, width = {"k": (32, 64), "v": (32, 64), "n": (64, 128), "p": (128, 64)}[
            name.removesuffix(".weight")[-1]
        ]
        if kind == GGMLQuantizationType.F32:
            tensors[name] = np.full((rows, width), 0.25, dtype=np.float32)
            continue
        raw = np.full((rows, width // elements * size), 3, dtype=np.uint8)
        tensors[name] = raw
    file = write_gguf(
        tmp_path / "m.gguf",
        model,
        matrix_type=GGMLQuantizationType.Q4_0,
        tensors=tensors,
        raw_types=mixed,
    )
    with caplog.at_level(logging.INFO):
        kept = run(file, "keep")
    assert distance(kept, run(file, "auto")) < 0.05
    assert "2 matrices, 0.1 MB, are not quantised and stay in the dtype" in caplog.text
    assert "model.layers.1.mlp.down_proj.weight" in caplog.text
    assert "model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj.weight" in caplog.text


def test_nothing_to_keep_is_refused(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "plain")
    file = write_gguf(tmp_path / "m.gguf", make_llama(), matrix_type=GGMLQuantizationType.Q5_0)
    for path in (folder, file):
        with pytest.raises(CheckpointError, match="'keep' was asked for, but the checkpoint"):
            MatrixForm("keep", open_checkpoint(path))


def test_what_load_time_modes_make_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices in the form asked for, the head of int4 in 8 bits; norms and embedding as floats."""
    packed: list[object] = []
    monkeypatch.setattr(
        "legato.worker.weights.weight_reader.pack_weight",
        lambda weight, **_: packed.append(weight) or weight,
    )
    folder = make_llama_folder(tmp_path / "m", tie_word_embeddings=True, hidden_size=72)
    plain = run(folder, "auto")
    assert all(isinstance(weight, torch.Tensor) for weight in packed)
    for weights, bits, limit in (("int8", 8, 0.1), ("int4", 4, 0.8), ("int4-g128-sym", 4, 0.9)):
        packed.clear()
        logits = run(folder, weights)
        head, *others = [w for w in packed if isinstance(w, QuantizedWeight)]
        assert len(packed) == 1 + len(others) == 1 + 3 * 4
        assert (head.bits, head.out_features) == (8, 320)
        assert {weight.bits for weight in others} == {bits}
        assert 0 < distance(logits, plain) < limit


def test_a_matrix_whose_width_is_no_multiple_of_8_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_llama_folder(tmp_path / "m", intermediate_size=100)
    with caplog.at_level(logging.INFO):
        logits = run(folder, "int8")
    assert "3 matrices, 0.1 MB, are not quantised and stay in the dtype" in caplog.text
    assert "mlp.down_proj.weight" in caplog.text
    plain = run(folder, "auto")
    assert distance(logits, plain) < 0.08
