"""Every family from a Hugging Face folder: names, spellings, heads, and what is refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors, read_all
from model_checks import assert_same, random_tokens, reference_logits
from oracle import load_oracle
from paged_runner import PagedRunner
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_model, make_model_folder
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    SiglipVisionConfig,
)

from legato.worker.config import WorkerConfig
from legato.worker.loading import load_model
from legato.worker.models.build import build_model
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
PROMPT = random_tokens(60)


def our_logits(folder: Path) -> Tensor:
    model = build_model(open_checkpoint(folder), CPU, torch.float32)
    return PagedRunner(model).step({0: PROMPT}, all_logits=True)


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    tensors = {new_name(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_b38_a_folder_equals_transformers(tmp_path: Path, family: str, *, tied: bool) -> None:
    folder = make_model_folder(tmp_path / "model", family, tie_word_embeddings=tied)
    assert_same(our_logits(folder), reference_logits(load_oracle(folder), PROMPT))


def no_change(folder: Path) -> None:
    """As transformers 5 writes it."""
    assert (folder / "config.json").exists()


def old_spelling(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        rope_parameters=...,
        layer_types=...,
        dtype=...,
        rope_theta=20000.0,
        torch_dtype="float32",
    )


def old_gemma(folder: Path) -> None:
    old_spelling(folder)
    edit_json(
        folder / "config.json",
        sliding_window_pattern=2,
        rope_local_base_freq=700.0,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    )


def embedding(folder: Path) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    names = ("embed_tokens.weight", "wte.weight")
    return next(tensor for name, tensor in tensors.items() if name.endswith(names))


def stale_head(folder: Path) -> None:
    """transformers takes the file's word where a tied model's head differs."""
    edit_tensors(folder, lm_head__weight=embedding(folder).flip(0).contiguous())


def copied_head(folder: Path) -> None:
    edit_tensors(folder, lm_head__weight=embedding(folder).clone())


def without_prefix(folder: Path) -> None:
    """As the first GPT-2 files were written, with their causal masks."""
    rename(folder, lambda name: name.removeprefix("transformer."))
    mask = torch.ones(1, 1, 512, 512).tril().bool()
    edit_tensors(folder, h__0__attn__bias=mask, h__0__attn__masked_bias=torch.tensor(-1e4))


def with_masks(folder: Path) -> None:
    mask = torch.ones(1, 1, 512, 512, dtype=torch.uint8).tril()
    edit_tensors(folder, transformer__h__1__attn__bias=mask)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", old_spelling),
        ("qwen2", old_spelling),
        ("qwen3", old_spelling),
        ("gemma3", old_gemma),
        ("qwen3", stale_head),
        ("gemma3", stale_head),
        ("gpt2", stale_head),
        ("qwen2", copied_head),
        ("gpt2", copied_head),
        ("gpt2", without_prefix),
        ("gpt2", with_masks),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_b38_old_spellings_and_odd_heads(
    tmp_path: Path, family: str, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model_folder(tmp_path / "model", family, tie_word_embeddings=True)
    plain = our_logits(folder)
    change(folder)
    with caplog.at_level(logging.WARNING):
        ours = our_logits(folder)
    assert_same(ours, reference_logits(load_oracle(folder), PROMPT))
    changes_nothing = change in (copied_head, without_prefix, with_masks)
    assert torch.equal(ours, plain) == changes_nothing
    assert ("differs" in caplog.text) == (change is stale_head)


def test_greedy_ids_of_a_folder_saved_in_bfloat16(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "gemma3")
    file = folder / "model.safetensors"
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", dtype="bfloat16")
    assert open_checkpoint(folder).native_dtype == torch.bfloat16
    assert_same(our_logits(folder), reference_logits(load_oracle(folder), PROMPT))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = make_model("gemma3")
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=1)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    folder = tmp_path_factory.mktemp("multimodal")
    whole.save_pretrained(folder)
    return folder


def transformers_4_names(name: str) -> str:
    """`language_model.model.…` and vision at the top, as published files have them."""
    name = name.replace("model.language_model.", "language_model.model.")
    return name.removeprefix("model.")


def transformers_5_names(name: str) -> str:
    name = name.replace("language_model.model.", "model.language_model.")
    return f"model.{name}" if name.startswith(("vision_tower", "multi_modal")) else name


@pytest.mark.parametrize("names", [transformers_4_names, transformers_5_names])
def test_the_language_model_of_a_multimodal_gemma3(
    tmp_path: Path, multimodal: Path, names: Callable[[str], str]
) -> None:
    tensors = {names(n): t for n, t in load_file(multimodal / "model.safetensors").items()}
    assert any("vision_tower" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((multimodal / "config.json").read_text())
    assert_same(our_logits(tmp_path), reference_logits(make_model("gemma3"), PROMPT))


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "gpt2")
    edit_tensors(folder, h__0__ln_1__bias=torch.zeros(64))
    with pytest.raises(CheckpointError, match=r"h\.0\.ln_1\.bias is the same as"):
        open_checkpoint(folder)


# B44: what is wrong is named, with its file.


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"model__layers__1__self_attn__k_proj__bias": None}, "k_proj.bias of shape [32]"),
        (
            "qwen2",
            {"model__layers__0__self_attn__o_proj__bias": torch.zeros(64)},
            "no place for tensor model.layers.0.self_attn.o_proj.bias",
        ),
        ("qwen3", {"model__layers__2__self_attn__q_norm__weight": None}, "q_norm.weight of shape"),
        (
            "qwen3",
            {"model__layers__2__self_attn__k_norm__weight": torch.ones(128)},
            "k_norm.weight has shape [128], the model needs [32]",
        ),
        (
            "llama",
            {"model__layers__2__self_attn__k_norm__weight": torch.ones(16)},
            "no place for tensor model.layers.2.self_attn.k_norm.weight",
        ),
        (
            "gemma3",
            {"model__layers__0__post_feedforward_layernorm__weight": None},
            "post_feedforward_layernorm.weight of shape [64] is missing",
        ),
        ("gpt2", {"transformer__wpe__weight": torch.zeros(100, 64)}, "has shape [100, 64], the"),
        ("gpt2", {"transformer__h__0__attn__c_attn__bias": None}, "c_attn.bias of shape [192]"),
        (
            "gpt2",
            {"transformer__h__1__mlp__c_fc__weight": torch.zeros(128, 64)},
            "c_fc.weight has shape [128, 64], the model needs [64, 128]",
        ),
        ("gpt2", {"transformer__extra": torch.zeros(1)}, "no place for tensor transformer.extra"),
    ],
    ids=str,
)
def test_b44_wrong_tensors_are_named(
    tmp_path: Path, family: str, changes: dict[str, Tensor | None], message: str
) -> None:
    folder = make_model_folder(tmp_path / "model", family)
    edit_tensors(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lowered_context_leaves_weights_and_fingerprint_alone(
    tmp_path: Path, family: str
) -> None:
    folder = make_model_folder(tmp_path / "model", family)
    settings: dict[str, Any] = {"model": str(folder), "role": "decode", "device": "cpu"}
    whole = load_model(WorkerConfig(**settings))
    lowered = load_model(WorkerConfig(**settings, context_length=100))
    assert (whole.model.config.context_length, lowered.model.config.context_length) == (512, 100)
    assert lowered.fingerprint == whole.fingerprint
    ours = [PagedRunner(loaded.model).step({0: PROMPT}) for loaded in (whole, lowered)]
    assert torch.equal(*ours)


def test_all_tensors_of_every_family_are_read(tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = make_model_folder(tmp_path / family, family)
        theirs = dict(load_oracle(folder).named_parameters())
        ours = read_all(open_checkpoint(folder))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name].data), name
