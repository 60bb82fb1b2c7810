from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, edit_tensors, read_all
from paged_runner import PagedRunner
from quantized_folders import (
    IN_LAYER,
    Integers,
    awq_parts,
    ct_parts,
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


# --- refusals ---------------------------------------------------------------------------------


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
