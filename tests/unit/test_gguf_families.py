"""GGUF files of every architecture against transformers in fp32."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_oracle import transformers_reading
from model_checks import (
    assert_same,
    check_prefill_then_decode,
    random_tokens,
    reference_logits,
)
from paged_runner import PagedRunner
from tiny_gguf import gguf_tensors, take_gguf_tensors, write_gguf
from tiny_models import make_model

from legato.worker.models import gguf_config
from legato.worker.models.build import build_model
from legato.worker.models.hf_config import model_config
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.gguf_names import GGUF_NAMES
from legato.worker.weights.matrix_form import MatrixForm
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from legato.worker.forward import Model
    from legato.worker.models.config import ModelConfig

Kind = GGMLQuantizationType
CPU = torch.device("cpu")
WINDOW = 20  # not a multiple of the block size
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
}
# What a file of the family can say: Qwen2's windows, for one, it cannot.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32},
    "gemma3": {
        "num_hidden_layers": 7,  # one behind the first with full attention
        "layer_types": None,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gpt2": {},
}
OTHERS = ["qwen2", "qwen3", "gemma3", "gpt2"]


def make(family: str, **overrides: Any) -> PreTrainedModel:  # noqa: ANN401  # passed on to the config
    return make_model(family, **(FAMILIES[family] | overrides))


def load(file: Path, weights: str = "auto") -> Model:
    checkpoint = open_checkpoint(file)
    return build_model(checkpoint, CPU, torch.float32, form=MatrixForm(weights, checkpoint))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Model]:
    reference = make(request.param)
    return reference, load(write_gguf(tmp_path_factory.mktemp("f32") / "m.gguf", reference))


@pytest.mark.parametrize("length", [1, WINDOW, WINDOW + 1, 75])
def test_prefill_and_decode(pair: tuple[PreTrainedModel, Model], length: int) -> None:
    check_prefill_then_decode(*pair, length)


def hf_config(model: PreTrainedModel) -> ModelConfig:
    return model_config(json.loads(model.config.to_json_string(use_diff=False)), "memory")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_of_the_folder(tmp_path: Path, family: str) -> None:
    reference = make(family)
    ours = dataclasses.asdict(open_checkpoint(write_gguf(tmp_path / "m.gguf", reference)).config)
    theirs = dataclasses.asdict(hf_config(reference))
    for found in (ours, theirs):
        eps = found.pop("norm_eps")  # fp32 in the file
        assert eps == pytest.approx(reference.config.to_dict().get("rms_norm_eps", 1e-5), rel=1e-6)
    assert ours == theirs


@pytest.mark.parametrize(
    ("family", "settings", "metadata"),
    [
        ("mistral", {"sliding_window": WINDOW}, {"llama.attention.sliding_window": WINDOW}),
        ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}, {}),
        ("qwen2", {"tie_word_embeddings": True, "head_dim": 8}, {}),
        ("qwen2", {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0}}, {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 80}, {}),
        ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}, {}),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]},
            {"gemma3.attention.sliding_window_pattern": 2},
        ),
        (
            "gemma3",
            {"layer_types": ["full_attention"] * 7},
            {"gemma3.attention.sliding_window": None, "gemma3.rope.freq_base_swa": None},
        ),
        ("gpt2", {"tie_word_embeddings": False, "intermediate_size": None}, {}),
        ("gpt2", {"hidden_size": 60, "num_attention_heads": 6, "layer_norm_epsilon": 1e-2}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_options(
    tmp_path: Path, family: str, settings: dict[str, Any], metadata: dict[str, Any]
) -> None:
    reference = make(family, **settings)
    model = load(write_gguf(tmp_path / "m.gguf", reference, metadata=metadata))
    check_prefill_then_decode(reference, model, 2 * WINDOW, steps=2)


def test_gemma_27b_is_known_by_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are scaled by hidden_size / heads, which no key tells."""
    assert gguf_config.GEMMA3_27B_LAYERS == 62
    monkeypatch.setattr(gguf_config, "GEMMA3_27B_LAYERS", 7)  # as many as ours has
    reference = make("gemma3", query_pre_attn_scalar=64 // 4)
    model = load(write_gguf(tmp_path / "m.gguf", reference))
    check_prefill_then_decode(reference, model, 2 * WINDOW, steps=2)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        # Only what its reader takes from the file differs from its configs' defaults.
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
        (
            "gemma3",
            {
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
        ("gpt2", {"max_position_embeddings": 1024, "intermediate_size": 256}),
    ],
)
def test_transformers_reads_the_same_from_the_file(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reference = make(family, **settings)
    file = write_gguf(tmp_path / "m.gguf", reference)
    second = transformers_reading(file)
    tokens = random_tokens(50)
    expected = reference_logits(second, tokens)
    assert_same(expected, reference_logits(reference, tokens))  # the file is as it should be
    assert_same(PagedRunner(load(file)).step({0: tokens}, all_logits=True), expected)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((kind, family) for kind in (Kind.F16, Kind.Q8_0) for family in OTHERS),
        (Kind.BF16, "qwen3"),
        (Kind.Q4_0, "gemma3"),
        (Kind.Q4_1, "gpt2"),
        (Kind.Q5_0, "qwen2"),
        (Kind.Q5_1, "gpt2"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_stored_types(tmp_path: Path, family: str, kind: Kind) -> None:
    reference = make(family)
    file = write_gguf(tmp_path / "m.gguf", reference, matrix_type=kind)
    stored = {
        name: dequantize(quantize(values, kind), kind) if values.ndim > 1 else values
        for name, values in gguf_tensors(reference).items()
    }
    take_gguf_tensors(reference, stored)
    check_prefill_then_decode(reference, load(file), 2 * WINDOW, steps=1)


# Where the fp16 factors lie in a block, and how large they are for weights of about 0.1.
K_SCALES = {
    Kind.Q2_K: {80: 0.01, 82: 0.015},
    Kind.Q3_K: {108: 0.003},
    Kind.Q4_K: {0: 0.0005, 2: 0.004},
    Kind.Q5_K: {0: 0.0003, 2: 0.004},
    Kind.Q6_K: {208: 0.0001},
}


def random_k_blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> np.ndarray:
    elements, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (shape[0], shape[1] // elements, block_bytes), dtype=np.uint8)
    for at, size in K_SCALES[kind].items():
        factors = (rng.uniform(0.5, 1.5, raw.shape[:2]) * size).astype(np.float16)
        raw[:, :, at : at + 2] = factors[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        (Kind.Q2_K, "llama"),
        (Kind.Q3_K, "qwen2"),
        (Kind.Q4_K, "gemma3"),
        (Kind.Q4_K, "gpt2"),
        (Kind.Q5_K, "qwen3"),
        (Kind.Q6_K, "gemma3"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_k_quants(tmp_path: Path, kind: Kind, family: str) -> None:
    # The package cannot quantise to these: every matrix is of random blocks.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    reference = make(family, **sizes, num_hidden_layers=2)
    stored = gguf_tensors(reference)
    raw = {
        name: random_k_blocks(kind, values.shape, seed)
        for seed, (name, values) in enumerate(stored.items())
        if values.ndim > 1 and values.shape[1] % 256 == 0
    }
    assert len(raw) >= 10
    file = write_gguf(
        tmp_path / "m.gguf", reference, tensors=raw, raw_types=dict.fromkeys(raw, kind)
    )
    take_gguf_tensors(
        reference, stored | {name: dequantize(blocks, kind) for name, blocks in raw.items()}
    )
    check_prefill_then_decode(reference, load(file), 2 * WINDOW, steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_that_are_kept_have_the_values_of_dequantised_ones(
    tmp_path: Path, family: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", make(family), matrix_type=Kind.Q8_0)
    checkpoint = open_checkpoint(file)
    num_kept = 0
    for name, shape in model_tensors(checkpoint.config):
        weight = checkpoint.quantized(name, shape)
        if weight is not None:
            num_kept += 1
            assert torch.equal(weight.dequantize(), checkpoint.tensor(name, shape, torch.float32))
    matrices = [name for name, shape in model_tensors(checkpoint.config) if len(shape) > 1]
    # GPT-2's matrices are asked for with the input first, but blocks lie along the input: its
    # embeddings alone are kept.
    assert num_kept == (2 if family == "gpt2" else len(matrices))
    tokens = {0: random_tokens(40)}
    plain = PagedRunner(load(file)).step(tokens, all_logits=True)
    kept = PagedRunner(load(file, "keep")).step(tokens, all_logits=True)
    # The CPU's kernels round activations to 8 bits where the weights are quantised.
    assert float((kept - plain).norm() / plain.norm()) < 0.1


def test_norms_stored_in_half_precision_are_lowered_in_fp32(tmp_path: Path) -> None:
    reference = make("gemma3")
    norm = np.linspace(0.3, 60.0, 64).astype(np.float16)
    file = write_gguf(
        tmp_path / "m.gguf",
        reference,
        tensors={"output_norm.weight": norm},
        raw_types={"output_norm.weight": Kind.F16},
    )
    found = open_checkpoint(file).tensor("model.norm.weight", (64,), torch.float32)
    assert torch.equal(found, torch.from_numpy(norm.astype(np.float32) - 1))


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "tensors", "message"),
    [
        ("qwen2", {"blk.1.attn_k.bias": None}, "layers.1.self_attn.k_proj.bias of shape [32] is "),
        ("qwen2", {"blk.0.attn_q.bias": None}, "layers.0.self_attn.q_proj.bias of shape [64] is "),
        ("qwen2", {"blk.0.attn_q_norm.weight": zeros(16)}, "no place for tensor blk.0.attn_q_norm"),
        ("qwen2", {"rope_freqs.weight": zeros(8) + 1}, "tensor rope_freqs.weight is supported for"),
        ("qwen3", {"blk.2.attn_q_norm.weight": None}, "layers.2.self_attn.q_norm.weight of shape"),
        ("qwen3", {"blk.0.attn_k_norm.weight": zeros(16)}, "k_norm.weight has shape [16], the"),
        ("qwen3", {"cls.output.weight": zeros(2, 64)}, "no place for tensor cls.output.weight"),
        ("gemma3", {"blk.6.post_ffw_norm.weight": None}, "post_feedforward_layernorm.weight of "),
        ("gemma3", {"blk.6.post_attention_norm.weight": None}, "post_attention_layernorm.weight"),
        ("gemma3", {"blk.6.ffn_norm.weight": None}, "pre_feedforward_layernorm.weight of shape"),
        ("gemma3", {"v.patch_embd.weight": zeros(4, 4)}, "no place for tensor v.patch_embd.weight"),
        ("gpt2", {"position_embd.weight": None}, "transformer.wpe.weight of shape [512, 64] is "),
        ("gpt2", {"blk.0.attn_qkv.bias": None}, "attn.c_attn.bias of shape [192] is missing"),
        ("gpt2", {"blk.1.attn_qkv.weight": zeros(64, 192)}, "has shape [192, 64], the model needs"),
        ("gpt2", {"blk.1.attn_q.weight": zeros(64, 64)}, "no place for tensor blk.1.attn_q.weight"),
        ("gpt2", {"blk.3.ffn_up.weight": zeros(128, 64)}, "no place for tensor transformer.h.3."),
        ("llama", {"blk.0.attn_qkv.weight": zeros(4, 4)}, "no place for tensor blk.0.attn_qkv"),
        ("llama", {"model.norm.weight": zeros(64)}, "a llama has no place for tensor model.norm."),
        ("llama", {"blk.00.attn_norm.weight": zeros(64)}, "no place for tensor blk.00.attn_norm"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_missing_extra_or_misshapen_tensors(
    tmp_path: Path, family: str, tensors: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", make(family), tensors=tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert "bad.gguf: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("qwen2", {"qwen2.attention.sliding_window": 64}, "qwen2.attention.sliding_window is 64"),
        ("qwen2", {"qwen2.block_count": None}, "qwen2.block_count is missing"),
        ("qwen2", {"qwen2.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor must be 1"),
        ("qwen2", {"qwen2.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        (
            "qwen3",
            {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": -4.0},
            "qwen3.rope.scaling.factor must be a finite number above 0, got -4.0",
        ),
        (
            "qwen3",
            {
                "qwen3.rope.scaling.type": "yarn",
                "qwen3.rope.scaling.factor": 4.0,
                "qwen3.rope.scaling.original_context_length": 0,
            },
            "qwen3.rope.scaling.original_context_length must be at least 1, got 0",
        ),
        ("qwen3", {"qwen3.attention.value_length": 16}, "qwen3.attention.value_length is 16"),
        ("qwen3", {"qwen3.attention.layer_norm_rms_epsilon": None}, "rms_epsilon is missing"),
        ("gemma3", {"gemma3.rope.freq_base": None}, "gemma3.rope.freq_base is missing"),
        ("gemma3", {"gemma3.rope.freq_base_swa": 0.0}, "rope.freq_base_swa must be a finite"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "logit_softcapping is 30.0"),
        ("gemma3", {"gemma3.attention.sliding_window": "20"}, "sliding_window must be a whole "),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "window_pattern must be at "),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True, False]},
            "gemma3.attention.sliding_window_pattern must be a whole number",
        ),
        ("gpt2", {"gpt2.attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
        ("gpt2", {"gpt2.attention.head_count_kv": 2}, "gpt2.attention.head_count_kv must be as"),
        ("gpt2", {"gpt2.attention.key_length": 32}, "gpt2.embedding_length 64 must be 4 heads"),
        ("gpt2", {"gpt2.context_length": 100}, "transformer.wpe.weight has shape [512, 64]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_cannot_be_served(
    tmp_path: Path, family: str, metadata: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", make(family), metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert "bad.gguf: " in str(caught.value)
    assert message in str(caught.value)


def _names(architecture: str, **changes: Any) -> Callable[[pytest.MonkeyPatch], None]:  # noqa: ANN401  # of GgufNames
    def plant(patch: pytest.MonkeyPatch) -> None:
        wrong = dataclasses.replace(GGUF_NAMES[architecture], **changes)
        patch.setitem(GGUF_NAMES, architecture, wrong)

    return plant


def _constant(name: str, value: float) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(gguf_config, name, value)


def _swapped(architecture: str, one: str, other: str) -> Callable[[pytest.MonkeyPatch], None]:
    table = dict(GGUF_NAMES[architecture].in_layer)
    table[one], table[other] = table[other], table[one]
    return _names(architecture, in_layer=table)


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("llama", _names("llama", interleaves_heads=False)),
        ("qwen2", _names("qwen2", interleaves_heads=True)),
        ("qwen3", _names("qwen3", interleaves_heads=True)),
        ("gemma3", _names("gemma3", interleaves_heads=True)),
        ("gemma3", _names("gemma3", adds_to_norms=0.0)),
        ("gemma3", _swapped("gemma3", "post_attention_norm", "ffn_norm")),
        ("gemma3", _swapped("gemma3", "ffn_norm", "post_ffw_norm")),
        ("gemma3", _constant("GEMMA3_WINDOW_PATTERN", 5)),
        ("gemma3", _constant("GEMMA3_WINDOW_PATTERN", 7)),
        ("gemma3", _constant("GEMMA3_27B_LAYERS", 7)),
        # The one matrix of GPT-2 that is square: no shape gives it away.
        ("gpt2", _names("gpt2", transposes=("c_attn.weight", "mlp.c_proj.weight", "c_fc.weight"))),
        ("gpt2", _swapped("gpt2", "attn_norm", "ffn_norm")),
    ],
)
def test_a_wrong_rule_would_be_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    reference = make(family)
    file = write_gguf(tmp_path / "m.gguf", reference)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_prefill_then_decode(reference, load(file), 2 * WINDOW, steps=1)
