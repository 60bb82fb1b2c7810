from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from legato.worker.models.config import ModelConfig, RopeConfig
from legato.worker.models.gguf_config import llama3_divisors
from legato.worker.models.hf_config import declared_dtype, model_config
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

WHERE = "folder/config.json"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


def settings(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # any JSON value
    """A small Llama's config.json; a value of ... takes a field out."""
    base = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    }
    return {name: value for name, value in (base | changes).items() if value is not ...}


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


# B39 (the config's side): everything that RoPE needs, as transformers itself reads it.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_scaling": None, "rope_theta": 500000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_theta": 20000.0}, "rope_theta": 30000.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
            "rope_theta": 30000.0,
        },
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 64}, "rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 64, "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 64}, ORIGINAL: 128},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": ...},
        MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0},
        MISTRAL | {"sliding_window": None, "num_key_value_heads": ..., "num_attention_heads": 8},
        MISTRAL | {"sliding_window": None, "max_position_embeddings": ...},
        {"num_key_value_heads": ...},
        {"num_key_value_heads": None, "head_dim": None},
        {"head_dim": 8},
        {"head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"architectures": ...},
        {"architectures": None, "hidden_act": "silu", "pretraining_tp": 2},
    ],
    ids=lambda changes: json.dumps(changes, default=str)[:60],
)
def test_reads_what_transformers_reads(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = settings(**changes)
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.standardize_rope_params()  # as every model does again when it is built
    ours = model_config(values, WHERE)
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.vocab_size == theirs.vocab_size
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.kind == rope["rope_type"]
    if ours.rope.kind != "default":
        assert ours.rope.factor == rope["factor"]
    if ours.rope.kind == "llama3":
        assert ours.rope.low_freq_factor == rope["low_freq_factor"]
        assert ours.rope.high_freq_factor == rope["high_freq_factor"]
        assert ours.rope.original_context_length == rope[ORIGINAL]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is GPT2LMHeadModel; supported are"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "must be a list of one name"),
        ({"model_type": "mistral"}, "'mistral', which does not belong to LlamaForCausalLM"),
        ({"model_type": "gemma3", "architectures": ...}, "model_type is 'gemma3'; supported are"),
        ({"model_type": ..., "architectures": ...}, "model_type and architectures are missing"),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window is 4096"),
        (MISTRAL, "sliding_window is missing, which means 4096"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "method gptq"),
        ({"quantization_config": {"bits": 4}}, "method not named"),
        ({"quantization": {"group_size": 64}}, "quantization says"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "320"}, "vocab_size must be a whole number, got '320'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_attention_heads": 5}, "hidden_size 64 must be a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0, got 0"),
        ({"rms_norm_eps": float("inf")}, "above 0, got inf"),
        ({"rms_norm_eps": 10**400}, "above 0, got 1000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object, got [1]"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "novel"}}, "is 'novel'; supported are default, linear"),
        ({"rope_scaling": {"type": ["linear"]}}, "is ['linear']; supported are"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, got '2'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a finite number"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, ORIGINAL: 0}},
            "original_max_position_embeddings must be at least 1, got 0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config(settings(**changes), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert message in str(caught.value)


def test_mistral_has_no_biases_whatever_its_config_says() -> None:
    values = settings(**MISTRAL, sliding_window=None, attention_bias=True)
    assert not model_config(values, WHERE).attention_bias


def test_mistral_with_null_kv_heads_has_as_many_as_query_heads() -> None:
    values = settings(**MISTRAL, sliding_window=None, num_key_value_heads=None)
    assert model_config(values, WHERE).num_kv_heads == 4


def test_declared_dtype_in_both_spellings() -> None:
    assert declared_dtype({}, WHERE) is None
    assert declared_dtype({"dtype": None, "torch_dtype": "float16"}, WHERE) == torch.float16
    assert declared_dtype({"dtype": "torch.bfloat16"}, WHERE) == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"config\.json: dtype is 'float8_e4m3fn'; supported"):
        declared_dtype({"dtype": "float8_e4m3fn"}, WHERE)


def test_llama3_divisors_follow_transformers_rule() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for original, theta, head_dim in [(64, 1e4, 32), (8192, 5e5, 128), (8192, 5e5, 64)]:
        parameters = {"rope_type": "llama3", "rope_theta": theta, **LLAMA3, ORIGINAL: original}
        config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
        theirs = LlamaRotaryEmbedding(config).inv_freq
        rope = RopeConfig(theta, "llama3", 8.0, 1.0, 4.0, original)
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        torch.testing.assert_close(plain / torch.tensor(llama3_divisors(rope, head_dim)), theirs)


def test_model_config_is_frozen() -> None:
    config = model_config(settings(), WHERE)
    assert isinstance(config, ModelConfig)
    with pytest.raises(AttributeError):
        config.num_layers = 3  # type: ignore[misc]  # that is the point
