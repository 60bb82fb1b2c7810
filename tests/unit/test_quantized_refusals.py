"""Quantised checkpoints that are refused: what is not served, and what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors
from quantized_folders import (
    AWQ,
    DOWN,
    GPTQ,
    ct,
    ct_parts,
    gptq_folder,
    quantized_folder,
)
from safetensors.torch import load_file

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported are gptq"),
        ({"bits": 4}, "quant_method is missing; supported are gptq"),
        (GPTQ | {"bits": 3}, "bits is 3; supported are 4 and 8"),
        (GPTQ | {"bits": "4"}, "bits must be a whole number"),
        (GPTQ | {"group_size": 20}, "group_size is 20"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"format": "bitblas"}, "format is 'bitblas'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is true"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic gives layers"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        (AWQ | {"bits": 8}, "bits is 8; supported is 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; supported is gemm"),
        (AWQ | {"zero_point": False}, "zero_point is false"),
        (AWQ | {"backend": "llm-awq"}, "backend is 'llm-awq'"),
        (ct("float-quantized", type="float", num_bits=8), "weights: type is 'float'"),
        (ct("float-quantized", num_bits=8), "format is 'float-quantized'; supported are pack"),
        (ct("marlin-24"), "format is 'marlin-24'"),
        (ct("pack-quantized", num_bits=3), "num_bits is 3"),
        (ct("int-quantized", num_bits=4), "num_bits is 4"),
        (ct("pack-quantized", strategy="block"), "strategy is 'block'"),
        (ct("pack-quantized", group_size=12), "group_size is 12"),
        (ct("pack-quantized", dynamic=True), "dynamic is true"),
        (ct("pack-quantized") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        (ct("pack-quantized") | {"quantization_status": "frozen"}, "is 'frozen'"),
        (ct("pack-quantized") | {"sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
        (ct("pack-quantized") | {"config_groups": {}}, "config_groups must be an object"),
        (ct("pack-quantized") | {"config_groups": {"a": ["Linear"]}}, "config_groups.a must"),
    ],
)
def test_settings_that_are_not_served(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder, _ = gptq_folder(tmp_path / "m", num_hidden_layers=1)
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)
    assert "config.json: quantization_config" in str(caught.value)


def test_mlx_is_refused(tmp_path: Path) -> None:
    folder, _ = gptq_folder(tmp_path / "m", num_hidden_layers=1)
    edit_json(
        folder / "config.json", quantization_config=..., quantization={"bits": 4, "group_size": 64}
    )
    with pytest.raises(CheckpointError, match="quantization says that the weights are quantised"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("scales", None, "scales is missing"),
        ("qzeros", None, "qzeros is missing"),
        ("qweight", None, "qweight is missing"),
        ("scales", torch.ones(2, 64).half(), r"scales has shape [2, 64], must have [4, 64]"),
        ("scales", torch.ones(4, 64).int(), "scales has dtype I32"),
        ("qzeros", torch.ones(4, 16).int(), r"qzeros has shape [4, 16], must have [4, 8]"),
        ("qweight", torch.ones(16, 64).long(), "qweight has dtype I64, must have I32"),
        ("qweight", torch.ones(8, 64).int(), r"scales has shape [4, 64], must have [2, 64]"),
        ("g_idx", torch.zeros(64).int(), r"g_idx has shape [64], must have [128]"),
        ("weight", torch.zeros(64, 128), "both quantised and plain"),
    ],
)
def test_parts_that_do_not_fit_are_refused_at_open(
    tmp_path: Path, suffix: str, value: Tensor | None, message: str
) -> None:
    folder, _ = gptq_folder(tmp_path / "m")
    edit_tensors(folder, **{f"{DOWN}.{suffix}".replace(".", "__"): value})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)
    assert "model.safetensors: " in str(caught.value)
    assert DOWN in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("scales", float("nan"), "scales holds NaN or infinity"),
        ("scales", float("inf"), "scales holds NaN or infinity"),
        ("g_idx", 4, r"g_idx names a group outside [0, 4)"),
        ("g_idx", -1, r"g_idx names a group outside [0, 4)"),
    ],
)
def test_values_that_make_no_sense_are_refused_when_read(
    tmp_path: Path, suffix: str, value: float, message: str
) -> None:
    folder, _ = gptq_folder(tmp_path / "m")
    name = f"{DOWN}.{suffix}"
    tensor = load_file(folder / "model.safetensors")[name]
    tensor.view(-1)[7] = value
    edit_tensors(folder, **{name.replace(".", "__"): tensor})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tensor(f"{DOWN}.weight", (64, 128), torch.float32)
    with pytest.raises(CheckpointError) as caught_kept:
        checkpoint.quantized(f"{DOWN}.weight", (64, 128))
    assert f"model.safetensors: tensor {DOWN}.{message}" in str(caught.value)
    assert str(caught_kept.value) == str(caught.value)


def test_compressed_tensors_parts_that_make_no_sense(tmp_path: Path) -> None:
    folder, _ = quantized_folder(
        tmp_path / "m",
        lambda i: ct_parts(i, 4, packed=True, symmetric=False),
        ct("pack-quantized", symmetric=False, group_size=32),
    )
    good = {
        f"{DOWN}.{s}": load_file(folder / "model.safetensors")[f"{DOWN}.{s}"]
        for s in ("weight_shape", "weight_zero_point", "weight_packed")
    }
    cases: list[tuple[str, Tensor | None, str]] = [
        ("weight_shape", torch.tensor([64, 127]), "weight_shape holds [64, 127], must hold"),
        ("weight_zero_point", torch.full((64, 4), 8, dtype=torch.int8), "outside [-8, 7]"),
        ("weight_zero_point", torch.full((64, 3), 0, dtype=torch.int8), "must have [64, 4]"),
        ("weight_zero_point", None, "weight_zero_point is missing"),
        ("weight_packed", None, "weight_packed is missing"),
    ]
    for suffix, value, message in cases:
        name = f"{DOWN}.{suffix}"
        edit_tensors(folder, **{name.replace(".", "__"): value})
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder).quantized(f"{DOWN}.weight", (64, 128))
        assert message in str(caught.value)
        assert f"model.safetensors: tensor {DOWN}" in str(caught.value)
        edit_tensors(folder, **{name.replace(".", "__"): good[name]})
    # A zero point for each group in a byte of its own, as the first versions stored them.
    edit_tensors(
        folder,
        **{f"{DOWN}.weight_zero_point".replace(".", "__"): torch.zeros(64, 4, dtype=torch.int8)},
    )
    assert open_checkpoint(folder).quantized(f"{DOWN}.weight", (64, 128)) is not None


def test_a_width_that_is_no_multiple_of_8_is_refused(tmp_path: Path) -> None:
    folder, _ = gptq_folder(tmp_path / "m", bits=8, intermediate_size=132, group_size=-1)
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj has 132 inputs; .* multiple of 8"):
        open_checkpoint(folder)
