"""Checkpoints that come quantised: GPTQ, AWQ, compressed-tensors; read as weights and kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from checkpoints import edit_json, edit_tensors, read_all
from paged_runner import PagedRunner
from quantized_folders import (
    AWQ,
    DOWN,
    GPTQ,
    IN_LAYER,
    Integers,
    awq_parts,
    ct,
    ct_parts,
    gptq_folder,
    gptq_parts,
    quantized_folder,
)
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM

from legato.worker.models.build import build_model
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.matrix_form import MatrixForm
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")


def check(folder: Path, plain: dict[str, Tensor], bits: int, group_size: int) -> None:
    """Every tensor, read both ways, is what the integers say; nothing is left over."""
    tensors = read_all(open_checkpoint(folder))
    assert tensors.keys() <= plain.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, plain[name]), name
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.can_keep, checkpoint.auto_keeps) == (True, True)
    num_kept = 0
    for name, tensor in plain.items():
        shape = tuple(tensor.shape)
        kept = checkpoint.quantized(name, shape)
        if kept is None:
            checkpoint.tensor(name, shape, torch.float32)
            continue
        num_kept += 1
        assert torch.equal(kept.dequantize(), tensor), name
        assert (kept.bits, kept.in_features) == (bits, shape[1])
        assert kept.group_size == (shape[1] if group_size == -1 else group_size)
    assert num_kept == 3 * len(IN_LAYER)
    checkpoint.finish()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq(tmp_path: Path, bits: int, group_size: int, version: int) -> None:
    folder, plain = gptq_folder(tmp_path / "m", bits=bits, version=version, group_size=group_size)
    check(folder, plain, bits, group_size)


def test_gptq_symmetric_without_g_idx_in_shards_and_with_a_quantised_head(tmp_path: Path) -> None:
    def parts(integers: Integers) -> dict[str, Tensor]:
        made = gptq_parts(integers, 4)
        del made["g_idx"]
        return made

    folder, plain = quantized_folder(
        tmp_path / "m", parts, GPTQ | {"lm_head": True}, symmetric=True, head=True
    )
    tensors = read_all(open_checkpoint(folder))
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)


def test_gptq_in_activation_order_needs_g_idx(tmp_path: Path) -> None:
    def parts(integers: Integers) -> dict[str, Tensor]:
        made = gptq_parts(integers, 4)
        del made["g_idx"]
        return made

    folder, _ = quantized_folder(tmp_path / "m", parts, GPTQ | {"desc_act": True}, change=shuffled)
    with pytest.raises(CheckpointError, match=r"down_proj\.g_idx is missing from the checkpoint"):
        open_checkpoint(folder)


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_compressed_tensors_in_activation_order_need_g_idx(tmp_path: Path, order: object) -> None:
    folder, _ = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, 4, packed=True, symmetric=True),
        ct("pack-quantized", group_size=32, actorder=order),
        symmetric=True,
        change=shuffled,
    )
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_g_idx is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_compressed_tensors_quantised_in_an_order_that_is_not_kept(
    tmp_path: Path, order: object
) -> None:
    folder, plain = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, 4, packed=True, symmetric=True),
        ct("pack-quantized", group_size=32, actorder=order),
        symmetric=True,
    )
    check(folder, plain, 4, 32)


def test_an_unknown_activation_order_is_refused(tmp_path: Path) -> None:
    folder, _ = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, 4, packed=True, symmetric=True),
        ct("pack-quantized", group_size=32, actorder="novel"),
        symmetric=True,
    )
    with pytest.raises(CheckpointError, match="actorder is 'novel'; supported are weight, static"):
        open_checkpoint(folder)


def test_a_quantised_embedding_is_refused(tmp_path: Path) -> None:
    folder, _ = gptq_folder(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    made = {
        f"model__embed_tokens__{suffix}": tensors[f"model.layers.0.self_attn.q_proj.{suffix}"]
        for suffix in ("qweight", "qzeros", "scales", "g_idx")
    }
    edit_tensors(folder, model__embed_tokens__weight=None, **made)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is quantised, which"):
        open_checkpoint(folder)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq(tmp_path: Path, group_size: int) -> None:
    folder, plain = quantized_folder(
        tmp_path / "m", awq_parts, AWQ | {"group_size": group_size}, group_size=group_size
    )
    check(folder, plain, 4, group_size)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, -1), (8, 64), (8, -1)])
def test_compressed_tensors_packed(
    tmp_path: Path, bits: int, group_size: int, symmetric: bool
) -> None:
    strategy = "channel" if group_size == -1 else "group"
    folder, plain = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, bits, packed=True, symmetric=symmetric),
        ct(
            "pack-quantized",
            num_bits=bits,
            symmetric=symmetric,
            strategy=strategy,
            group_size=None if group_size == -1 else group_size,
        ),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
    )
    check(folder, plain, bits, group_size)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_compressed_tensors_int8(
    tmp_path: Path, form: str, symmetric: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ct(form, num_bits=8, symmetric=symmetric, strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    folder, plain = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, 8, packed=False, symmetric=symmetric),
        config,
        bits=8,
        group_size=-1,
        symmetric=symmetric,
    )
    check(folder, plain, 8, -1)
    assert "activations are not quantised here" in caplog.text


def test_compressed_tensors_one_scale_a_matrix_and_schemes_by_name(tmp_path: Path) -> None:
    """Layer 0 has a scheme of its own that names it; Linear is for all others."""
    config = ct("pack-quantized", group_size=32)
    own = ct("int-quantized", num_bits=8, strategy="tensor")["config_groups"]["group_0"]
    own |= {"targets": ["re:.*layers\\.0\\..*"], "format": "int-quantized"}
    config["config_groups"]["group_1"] = own
    count = iter(range(100))

    def parts(integers: Integers) -> dict[str, Tensor]:
        if next(count) >= len(IN_LAYER):  # names come sorted: layer 0 first
            return ct_parts(integers, 4, packed=True, symmetric=True)
        return ct_parts(integers, 8, packed=False, symmetric=True, tensor=True)

    turns = iter(range(100))

    def change(integers: Integers) -> Integers:
        if next(turns) >= len(IN_LAYER):
            return integers
        one_scale = integers.scales[:1, :1].expand_as(integers.scales).contiguous()
        wide = (integers.q * 16 + integers.q) % 256
        return replace(integers, q=wide, scales=one_scale, zeros=np.full_like(integers.zeros, 128))

    folder, plain = quantized_folder(tmp_path / "m", parts, config, symmetric=True, change=change)
    tensors = read_all(open_checkpoint(folder))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, plain[name]), name


def shuffled(integers: Integers) -> Integers:
    """As GPTQ leaves them with desc_act: neighbours of a group lie all over the row."""
    order = np.random.default_rng(1).permutation(integers.group_of_column)
    return replace(integers, group_of_column=order)


def test_gptq_act_order_is_dequantised_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = gptq_folder(tmp_path / "m", change=shuffled)
    tensors = read_all(open_checkpoint(folder))
    assert all(torch.equal(tensors[name], plain[name]) for name in tensors)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantized(f"{DOWN}.weight", (64, 128)) is None
    assert "out of order (act-order): such matrices are dequantised" in caplog.text
    with caplog.at_level(logging.INFO):
        logits = run(folder, "auto")
    torch.testing.assert_close(logits, oracle(folder, plain), rtol=1e-4, atol=1e-4)
    # The head, and for each layer qkv, o, gate and up, down.
    assert "13 matrices, 0.5 MB, are not quantised" in caplog.text


def oracle(folder: Path, plain: dict[str, Tensor]) -> Tensor:
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(plain, strict=True)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


TOKENS = [(37 * i + 5) % 256 for i in range(21)]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative: kernels for quantised weights round the activations to 8 bits."""
    return float((found - wanted).norm() / wanted.norm())


def run(folder: Path, weights: str) -> Tensor:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint, CPU, torch.float32, form=MatrixForm(weights, checkpoint))
    return PagedRunner(model).step({0: TOKENS}, all_logits=True)


@pytest.mark.parametrize("weights", ["auto", "keep"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_logits_are_those_of_the_dequantised_model(
    tmp_path: Path, method: str, weights: str
) -> None:
    if method == "gptq":
        folder, plain = gptq_folder(tmp_path / "m")
    else:
        folder, plain = quantized_folder(tmp_path / "m", awq_parts, AWQ)
    assert distance(run(folder, weights), oracle(folder, plain)) < 0.05


def test_names_of_the_forms(tmp_path: Path) -> None:
    folder, _ = gptq_folder(tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    names = {
        weights: MatrixForm(weights, checkpoint).name(torch.bfloat16)
        for weights in ("auto", "keep", "int8", "int4", "int4-g128-sym")
    }
    assert names == {
        "auto": "keep+bfloat16",
        "keep": "keep+bfloat16",
        "int8": "int8+bfloat16",
        "int4": "int4-g64+bfloat16",
        "int4-g128-sym": "int4-g128-sym+bfloat16",
    }


def test_the_zero_convention_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder, _ = gptq_folder(tmp_path / "m")
    before = open_checkpoint(folder).fingerprint
    values = json.loads((folder / "config.json").read_text())
    settings = values["quantization_config"] | {"checkpoint_format": "gptq_v2"}
    edit_json(folder / "config.json", quantization_config=settings)
    assert open_checkpoint(folder).fingerprint != before


def test_settings_in_the_old_file_beside_the_config(tmp_path: Path) -> None:
    for method, file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        if method == "gptq":
            folder, plain = gptq_folder(tmp_path / method)
            old = {"bits": 4, "group_size": 32, "desc_act": False}
        else:
            folder, plain = quantized_folder(tmp_path / method, awq_parts, AWQ)
            old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        edit_json(folder / "config.json", quantization_config=...)
        (folder / file).write_text(json.dumps(old))
        check(folder, plain, 4, 32)


def test_a_bias_of_zeros_beside_a_layer_without_one(tmp_path: Path) -> None:
    folder, plain = gptq_folder(tmp_path / "m")
    name = f"{DOWN}.bias".replace(".", "__")
    edit_tensors(folder, **{name: torch.zeros(64).half()})
    check(folder, plain, 4, 32)
    edit_tensors(folder, **{name: torch.ones(64).half()})
    with pytest.raises(CheckpointError, match=rf"no place for tensor {DOWN}\.bias"):
        open_checkpoint(folder)


def test_quantising_again_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, plain = gptq_folder(tmp_path / "m")
    with caplog.at_level(logging.WARNING):
        logits = run(folder, "int8")
    assert "quantised already" in caplog.text
    wanted = oracle(folder, plain)
    assert float((logits - wanted).abs().max()) > 1e-3  # it was quantised again
    assert distance(logits, wanted) < 0.05
