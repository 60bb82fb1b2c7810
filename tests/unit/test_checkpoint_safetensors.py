from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors, read_all
from safetensors.torch import load_file, save_file
from tiny_models import make_llama_folder
from transformers import AutoModelForCausalLM

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("single"))


# B38: every spelling and shape loads, equal to transformers' own reading of the folder.


def to_old_spelling(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        rope_parameters=...,
        dtype=...,
        rope_scaling=None,
        rope_theta=12345.0,
        torch_dtype="float32",
        num_key_value_heads=4,
    )


def leave_out_what_has_a_default(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        **dict.fromkeys(
            [
                "num_key_value_heads",
                "head_dim",
                "tie_word_embeddings",
                "attention_bias",
                "mlp_bias",
                "rms_norm_eps",
                "rope_parameters",
                "dtype",
                "hidden_act",
                "architectures",
            ],
            ...,
        ),
    )


def add_inv_freq(folder: Path) -> None:
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))


def keep_only_the_head_of_a_tied_model(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, model__embed_tokens__weight=None, lm_head__weight=embedding)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, None),
        ({"max_shard_size": "200KB"}, None),
        ({"tie_word_embeddings": True}, None),
        ({"tie_word_embeddings": True}, keep_only_the_head_of_a_tied_model),
        ({"head_dim": 32}, None),
        ({"head_dim": 8}, None),
        ({"num_key_value_heads": 1}, None),
        ({"num_key_value_heads": 4}, to_old_spelling),
        ({"num_key_value_heads": 4}, leave_out_what_has_a_default),
        ({"attention_bias": True, "mlp_bias": True}, None),
        ({}, add_inv_freq),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_b38_folder_equals_transformers(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[Path], None] | None
) -> None:
    folder = make_llama_folder(tmp_path / "model", **settings)
    if change is not None:
        change(folder)
    checkpoint = open_checkpoint(folder)
    ours = read_all(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].data), name
    config, expected = checkpoint.config, model.config
    assert config.head_dim == expected.head_dim
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.norm_eps == expected.rms_norm_eps
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == expected.tie_word_embeddings


def test_b38_a_differing_head_of_a_tied_model_is_used_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_llama_folder(tmp_path / "model", tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=embedding.clone())
    with caplog.at_level(logging.WARNING):
        read_all(open_checkpoint(folder))
    assert not caplog.records  # a plain copy is nothing to worry about
    edit_tensors(folder, lm_head__weight=embedding + 1)
    with caplog.at_level(logging.WARNING):
        ours = read_all(open_checkpoint(folder))
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"].data)
    assert not torch.equal(ours["lm_head.weight"], embedding)
    assert torch.equal(ours["model.embed_tokens.weight"], embedding)
    assert "tensor lm_head.weight differs" in caplog.text


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_dtype_is_native_and_converted(tmp_path: Path, stored: torch.dtype) -> None:
    folder = make_llama_folder(tmp_path / "model")
    tensors = {k: v.to(stored) for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", dtype=...)
    assert open_checkpoint(folder).native_dtype == stored
    for target in (torch.float32, torch.bfloat16):
        for name, tensor in read_all(open_checkpoint(folder), target).items():
            assert tensor.dtype == target
            assert torch.equal(tensor, tensors[name].to(target))


def test_declared_dtype_wins(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "model")
    edit_json(folder / "config.json", dtype=..., torch_dtype="bfloat16")
    assert open_checkpoint(folder).native_dtype == torch.bfloat16


def test_tensors_are_copies_that_a_change_of_the_file_cannot_reach(tmp_path: Path) -> None:
    folder = make_llama_folder(tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    ours = read_all(checkpoint)
    before = ours[DOWN].clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 4)
        opened.write(bytes(file.stat().st_size // 2))
    assert torch.equal(ours[DOWN], before)


def test_number_too_large_for_the_target_dtype_is_named(tmp_path: Path, single: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=torch.full((64, 128), 1e38))
    read_all(open_checkpoint(folder))  # the sum overflows, yet every number is finite
    with pytest.raises(CheckpointError, match=r"holds 1e\+38, too large for float16"):
        read_all(open_checkpoint(folder), torch.float16)


def test_asking_for_another_shape_or_name_is_refused(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=rf"{DOWN} has shape \[64, 128\], .* \[128, 64\]"):
        checkpoint.tensor(DOWN, (128, 64), torch.float32)
    with pytest.raises(CheckpointError, match=r"tensor model\.nope is missing"):
        checkpoint.tensor("model.nope", (1,), torch.float32)


def test_unread_tensors_are_named_at_finish(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    for name, shape in model_tensors(checkpoint.config):
        if name != DOWN:
            checkpoint.tensor(name, shape, torch.float32)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .* never read tensor {DOWN}"):
        checkpoint.finish()
