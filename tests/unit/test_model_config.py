from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from legato.worker.models.config import ModelConfig, RopeConfig
from legato.worker.models.gguf_rope import llama3_divisors
from legato.worker.models.hf_config import model_config
from legato.worker.models.hf_dtype import declared_dtype
from legato.worker.models.rope import inverse_frequencies
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
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
}
GPT2_FIELDS = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 320}
YARN = {"rope_type": "yarn", "factor": 4.0}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


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
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rope_scaling": YARN | {ORIGINAL: 64}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, ORIGINAL: 64},
        {"rope_parameters": YARN | {ORIGINAL: 64, "rope_theta": 1e6}},
        {"rope_scaling": YARN | {"factor": None, ORIGINAL: 64}},
        {"rope_scaling": YARN | {ORIGINAL: 64, "attention_factor": 1.7, "mscale": 2.0}},
        {"rope_scaling": YARN | {ORIGINAL: 64, "mscale": 2.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": YARN | {ORIGINAL: 64, "mscale": 2.0, "mscale_all_dim": 0}},
        {"rope_scaling": YARN | {ORIGINAL: 64, "beta_fast": 8, "beta_slow": 2.5}},
        {"rope_scaling": YARN | {ORIGINAL: 64, "beta_fast": 0, "truncate": False}},
        {"rope_scaling": YARN | {"factor": 1.0}},
        MISTRAL,
        MISTRAL | {"sliding_window": 64},
        MISTRAL | {"sliding_window": 64, "head_dim": 32, "hidden_size": 96},
        QWEN2,
        QWEN2 | {"num_key_value_heads": ..., "num_attention_heads": 32},
        QWEN2 | {"num_key_value_heads": None, "head_dim": 8},
        QWEN2 | {"rope_scaling": YARN | {ORIGINAL: 64}, "use_sliding_window": False},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 32},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 0},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 32},
        QWEN2 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        QWEN2 | {"use_sliding_window": True, "layer_types": [LOCAL, GLOBAL]},
        QWEN2 | {"layer_types": [GLOBAL, GLOBAL], "tie_word_embeddings": True},
        QWEN3,
        QWEN3 | {"head_dim": 48, "attention_bias": True},
        QWEN3 | {"use_sliding_window": True, "max_window_layers": 1},
        QWEN3 | {"rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-5},
        GEMMA3,
        GEMMA3 | {"num_key_value_heads": ..., "vocab_size": ..., "max_position_embeddings": ...},
        GEMMA3 | {"sliding_window": 32, "sliding_window_pattern": 2, "head_dim": 32},
        GEMMA3 | {"sliding_window_pattern": 1, "sliding_window": None},
        GEMMA3 | {"layer_types": [GLOBAL, LOCAL] * 4, "query_pre_attn_scalar": 100},
        GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
        GEMMA3 | {"rope_scaling": None, "attention_bias": True, "tie_word_embeddings": False},
        GEMMA3
        | {
            "rope_parameters": {
                GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5},
                LOCAL: {"rope_type": "default", "rope_theta": 2e4},
            }
        },
        GEMMA3 | {"rope_parameters": {LOCAL: None}, "rope_local_base_freq": 2e4},
        GEMMA3
        | {
            "rope_parameters": {GLOBAL: {"rope_type": "default", "rope_theta": 3e5}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
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
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // ours.num_heads
    assert ours.head_dim == head_dim
    assert ours.vocab_size == theirs.vocab_size
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    family = values["model_type"]
    bias = getattr(theirs, "attention_bias", False)
    assert ours.attention_bias == (bias or family == "qwen2")
    assert ours.attention_out_bias == bias
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qk_norm == (family in ("qwen3", "gemma3_text"))
    activation = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert ours.activation == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[activation]
    default = LOCAL if family == "mistral" and theirs.sliding_window else GLOBAL
    kinds = getattr(theirs, "layer_types", None) or [default] * ours.num_layers
    for layer, kind in enumerate(kinds):
        assert ours.window(layer) == (theirs.sliding_window if kind == LOCAL else None)
    nested = family == "gemma3_text"
    check_rope(ours.rope, theirs, GLOBAL if nested else None, head_dim)
    if nested:
        check_rope(ours.local_rope, theirs, LOCAL, head_dim)
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    else:
        assert ours.local_rope is ours.attention_scale is None


def check_rope(
    ours: RopeConfig | None,
    theirs: Any,  # noqa: ANN401  # of any family
    layer_type: str | None,
    head_dim: int,
) -> None:
    """The frequencies that transformers computes, and its factor of cos and sin."""
    assert ours is not None
    parameters = theirs.rope_parameters[layer_type] if layer_type else theirs.rope_parameters
    kind = parameters["rope_type"]
    assert ours.kind == kind
    if kind == "default":
        assert ours.theta == parameters["rope_theta"]
        return
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), layer_type=layer_type)
    assert torch.equal(inverse_frequencies(ours, head_dim), expected)
    assert ours.attention_factor == factor


GPT2_CHANGES: list[dict[str, Any]] = [
    {},
    {"n_inner": 100, "layer_norm_epsilon": 1e-6, "activation_function": "gelu_pytorch_tanh"},
    {"n_inner": None, "tie_word_embeddings": False, "reorder_and_upcast_attn": True},
    {"n_embd": ..., "hidden_size": 32, "n_layer": ..., "num_hidden_layers": 3},
    {"num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64},
]


@pytest.mark.parametrize("changes", GPT2_CHANGES, ids=str)
def test_reads_gpt2_as_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = gpt2_settings(**changes)
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = model_config(values, WHERE)
    assert ours.architecture == "gpt2"
    assert ours.num_layers == theirs.n_layer
    assert ours.hidden_size == theirs.n_embd
    assert ours.intermediate_size == (theirs.n_inner or 4 * theirs.n_embd)
    assert ours.num_heads == ours.num_kv_heads == theirs.n_head
    assert ours.head_dim == theirs.n_embd // theirs.n_head
    assert ours.vocab_size == theirs.vocab_size
    assert ours.context_length == theirs.n_positions
    assert ours.norm_eps == theirs.layer_norm_epsilon
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope is None
    assert ours.num_learned_positions == theirs.n_positions
    assert ours.attention_bias
    assert ours.attention_out_bias
    assert ours.mlp_bias


def gpt2_settings(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # any JSON value
    base = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | GPT2_FIELDS
    return {name: value for name, value in (base | changes).items() if value is not ...}


def multimodal(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # any JSON value
    text = settings(**GEMMA3 | {"architectures": ...}) | changes
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {name: value for name, value in text.items() if value is not ...},
        "vision_config": {"model_type": "siglip_vision_model"},
    }


def test_the_text_part_of_a_multimodal_gemma3_is_the_text_model() -> None:
    alone = model_config(settings(**GEMMA3, tie_word_embeddings=True), WHERE)
    assert model_config(multimodal(), WHERE) == alone
    published = multimodal(
        num_attention_heads=...,
        num_key_value_heads=...,
        vocab_size=...,
        max_position_embeddings=...,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    )
    config = model_config(published, WHERE)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_length) == (262_208, 131_072)
    assert config.rope == RopeConfig(1e6, "linear", 8.0)
    assert config.local_rope == RopeConfig(1e4)
    assert config.layer_windows == (1024,) * 5 + (None,) + (1024,) * 2


# B39: the exact values.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.1386294),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"attention_factor": 1.25, "mscale": 3.0, "mscale_all_dim": 1.0}, 1.25),
        ({"mscale": 0.707}, 1.1386294),  # alone it says nothing
    ],
)
def test_b39_yarns_attention_factor(changes: dict[str, Any], expected: float) -> None:
    rope = model_config(settings(rope_scaling=YARN | {ORIGINAL: 64} | changes), WHERE).rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architectures is MambaForCausalLM; supported are LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, "
            "Gemma3ForConditionalGeneration, GPT2LMHeadModel (model_type llama, mistral, qwen2, "
            "qwen3, gemma3_text, gemma3, gpt2)",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "must be a list of one name"),
        ({"model_type": "mistral"}, "'mistral', which does not belong to LlamaForCausalLM"),
        ({"model_type": "gemma2", "architectures": ...}, "model_type is 'gemma2'; supported are"),
        ({"model_type": ..., "architectures": ...}, "model_type and architectures are missing"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (MISTRAL | {"layer_types": [LOCAL, GLOBAL]}, "layer_types is not supported for Mistral"),
        (QWEN2 | {"layer_types": [LOCAL, GLOBAL]}, "layer_types has sliding_attention, but"),
        (QWEN2 | {"layer_types": [GLOBAL]}, "has 1 entries for num_hidden_layers 2"),
        (QWEN2 | {"layer_types": [GLOBAL, "chunked"]}, "layer_types has 'chunked'; supported are"),
        (QWEN2 | {"layer_types": "full_attention"}, "layer_types must be a list"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window is null, but there are layers"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; supported are"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has 'rope_theta'"),
        (GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 8}}, "has no rope_type"),
        (
            GEMMA3 | {"rope_parameters": {GLOBAL: {"rope_type": "dynamic", "factor": 2.0}}},
            "rope_parameters.full_attention.rope_type is 'dynamic'",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported are silu"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "320"}, "vocab_size must be a whole number, got '320'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 10000, got 0"),
        ({"num_hidden_layers": 10001}, "num_hidden_layers must be from 1 to 10000, got 10001"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_attention_heads": 5}, "hidden_size 64 must be a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0, got 0"),
        ({"rms_norm_eps": float("inf")}, "above 0, got inf"),
        ({"rms_norm_eps": 10**400}, "above 0, got 1000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object, got [1]"),
        (
            {"rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 2.0}},
            "beta_fast 1.0 must not be",
        ),
        ({"rope_scaling": YARN | {"factor": "4"}}, "rope_scaling.factor must be a number"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, "rope_scaling.mscale must be a finite number"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate must be true or false"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_scaling.rope_theta must not be 1"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "is 'longrope'; supported are",
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
        ({"is_causal": False}, "is_causal is False; only causal models are served"),
        (GEMMA3 | {"is_causal": None}, "is_causal is None; only causal models are served"),
        (
            {"max_position_embeddings": 2**31},
            "context_length must be at most 2147483647, got 2147483648",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config(settings(**changes), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ({"scale_attn_weights": False}, "scale_attn_weights is false"),
        ({"is_causal": False}, "is_causal is False"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'; supported are gelu_new"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"n_head": 5}, "n_embd 64 must be a multiple of n_head 5"),
        ({"n_embd": 60, "n_head": 12}, "head_dim must be even, got 5"),
        ({"n_head": 0}, "n_embd 64 must be a multiple of n_head 0"),
        ({"n_positions": ...}, "n_positions is missing"),
        ({"n_layer": 10**9}, "num_layers must be at most 10000"),
        ({"n_inner": 0}, "intermediate_size must be at least 1"),
    ],
)
def test_what_gpt2_is_not_served_with_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config(gpt2_settings(**changes), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (multimodal(head_dim="x"), "text_config.head_dim must be a whole number, got 'x'"),
        (multimodal(hidden_size=...), "text_config.hidden_size is missing"),
        (multimodal(is_causal=False), "text_config.is_causal is False"),
        (multimodal(model_type="llama"), "text_config.model_type is 'llama'"),
        (multimodal() | {"text_config": None}, "text_config must be an object, got None"),
        (
            multimodal(rope_scaling={"rope_type": "linear"}),
            "text_config.rope_scaling.factor is missing",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_errors_in_a_text_config_say_so(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_config(values, WHERE)
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

    for original, theta, head_dim in [(64, 1e4, 32), (8192, 5e5, 128), (8192, 5e5, 64)]:
        parameters = {"rope_type": "llama3", "rope_theta": theta, **LLAMA3, ORIGINAL: original}
        config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
        theirs = LlamaRotaryEmbedding(config).inv_freq
        rope = RopeConfig(theta, "llama3", 8.0, original)
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        torch.testing.assert_close(plain / torch.tensor(llama3_divisors(rope, head_dim)), theirs)


def test_model_config_is_frozen() -> None:
    config = model_config(settings(), WHERE)
    assert isinstance(config, ModelConfig)
    with pytest.raises(AttributeError):
        config.num_layers = 3  # type: ignore[misc]  # that is the point
