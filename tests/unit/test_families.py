"""Every family against transformers in fp32; `test_llama` goes deeper on what they share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from memory_checkpoint import MemoryCheckpoint
from model_checks import (
    BLOCK_SIZE,
    assert_same,
    build,
    check_prefill_then_decode,
    greedy_together,
    random_tokens,
    reference_logits,
)
from paged_runner import PagedRunner
from tiny_models import FAMILIES, VOCAB_SIZE, make_model

from legato.worker.models.build import build_model
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from legato.worker.forward import Model

CPU = torch.device("cpu")
WINDOW = 20  # of the tiny models that have one: not a multiple of the block size
OTHERS = [family for family in FAMILIES if family != "llama"]
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, WINDOW - 1, WINDOW, WINDOW + 1, 2 * BLOCK_SIZE + 1, 75]


@pytest.fixture(scope="module", params=OTHERS)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Model]:
    reference = make_model(request.param)
    return reference, build(reference)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_and_decode_over_the_edges_of_blocks_and_windows(
    pair: tuple[PreTrainedModel, Model], length: int
) -> None:
    check_prefill_then_decode(*pair, length, steps=4)


def test_32_greedy_tokens_of_a_batch(pair: tuple[PreTrainedModel, Model]) -> None:
    reference, model = pair
    prompts = [random_tokens(length, seed=1) for length in (1, 15, 16, 17, 48)]
    answers = greedy_together(model, prompts, 32)
    for prompt, answer in zip(prompts, answers, strict=True):
        # Each token is the reference's choice after those before it: so is the whole.
        logits = reference_logits(reference, prompt + answer)
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [16, 23])
def test_chunked_prefill_in_company(pair: tuple[PreTrainedModel, Model], chunk: int) -> None:
    reference, model = pair
    sequences = {s: random_tokens(70 - 9 * s, seed=s) for s in range(3)}
    expected = {s: reference_logits(reference, tokens) for s, tokens in sequences.items()}
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    for start in range(0, 70, chunk):
        parts = {s: tokens[start : start + chunk] for s, tokens in sequences.items()}
        parts = {s: part for s, part in parts.items() if part}
        logits = runner.step(parts)
        assert_same(
            logits,
            torch.stack([expected[s][start + len(part) - 1] for s, part in parts.items()]),
        )


def test_a_chunk_without_logits(pair: tuple[PreTrainedModel, Model]) -> None:
    reference, model = pair
    tokens = random_tokens(40)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    assert runner.step({0: tokens[:30]}, logits=False).shape == (0, VOCAB_SIZE)
    assert_same(runner.step({0: tokens[30:]}), reference_logits(reference, tokens)[-1:])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("qwen2", {"head_dim": 8, "num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
        ("qwen3", {"hidden_act": "gelu_pytorch_tanh", "head_dim": 80}),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3, "num_key_value_heads": 1}),
        ("gemma3", {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}),
        ("gpt2", {"tie_word_embeddings": False, "intermediate_size": None}),
        ("gpt2", {"num_attention_heads": 2, "activation_function": "gelu_pytorch_tanh"}),
        ("gpt2", {"hidden_size": 60, "num_attention_heads": 6, "layer_norm_epsilon": 1e-2}),
    ],
    ids=str,
)
def test_options(family: str, settings: dict[str, Any]) -> None:
    reference = make_model(family, **settings)
    model = build(reference)
    for length in (WINDOW + 3, 75):
        check_prefill_then_decode(reference, model, length, steps=2)


# B42: what a model that skips or shifts something would give is seen to differ.


def _filled(value: float, *endings: str) -> Callable[[MemoryCheckpoint], None]:
    def change(checkpoint: MemoryCheckpoint) -> None:
        names = [name for name in checkpoint.tensors if name.endswith(endings)]
        assert names
        for name in names:
            checkpoint.tensors[name] = torch.full_like(checkpoint.tensors[name], value)

    return change


def _window(length: int) -> Callable[[MemoryCheckpoint], None]:
    def change(checkpoint: MemoryCheckpoint) -> None:
        windows = tuple(length if w else None for w in checkpoint.config.layer_windows)
        checkpoint.config = replace(checkpoint.config, layer_windows=windows)

    return change


def _swapped_layers(checkpoint: MemoryCheckpoint) -> None:
    windows = tuple(None if w else WINDOW for w in checkpoint.config.layer_windows)
    checkpoint.config = replace(checkpoint.config, layer_windows=windows)


def _config(**changes: Any) -> Callable[[MemoryCheckpoint], None]:  # noqa: ANN401  # of ModelConfig
    def change(checkpoint: MemoryCheckpoint) -> None:
        checkpoint.config = replace(checkpoint.config, **changes)

    return change


def _one_rope(checkpoint: MemoryCheckpoint) -> None:
    checkpoint.config = replace(checkpoint.config, local_rope=checkpoint.config.rope)


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("mistral", _window(WINDOW - 1)),
        ("mistral", _window(WINDOW + 1)),
        ("mistral", _config(layer_windows=())),
        ("qwen2", _filled(0.0, "q_proj.bias")),
        ("qwen2", _filled(0.0, "k_proj.bias")),
        ("qwen2", _filled(0.0, "v_proj.bias")),
        ("qwen2", _swapped_layers),
        ("qwen3", _filled(1.0, "q_norm.weight")),
        ("qwen3", _filled(1.0, "k_norm.weight")),
        ("gemma3", _window(WINDOW + 1)),
        ("gemma3", _swapped_layers),
        ("gemma3", _one_rope),
        ("gemma3", _config(attention_scale=None)),
        ("gemma3", _config(activation="silu")),
        ("gemma3", _filled(0.0, "pre_feedforward_layernorm.weight")),
        ("gemma3", _filled(0.0, "post_feedforward_layernorm.weight")),
        ("gemma3", _filled(0.0, "q_norm.weight")),
        ("gpt2", _filled(0.0, "wpe.weight")),
        ("gpt2", _filled(0.0, "c_attn.bias")),
        ("gpt2", _filled(0.0, "mlp.c_proj.bias")),
        ("gpt2", _filled(0.0, "ln_f.bias")),
        ("gpt2", _config(norm_eps=1e-3)),
    ],
)
def test_a_skipped_or_shifted_part_would_be_seen(
    family: str, plant: Callable[[MemoryCheckpoint], None]
) -> None:
    reference = make_model(family)
    checkpoint = MemoryCheckpoint(reference)
    plant(checkpoint)
    model = build_model(checkpoint, CPU, torch.float32)
    with pytest.raises(AssertionError, match="not close"):
        check_prefill_then_decode(reference, model, 2 * WINDOW, steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_read_once_and_counted(family: str) -> None:
    reference = make_model(family, num_hidden_layers=2, layer_types=None)
    checkpoint = MemoryCheckpoint(reference)
    calls: list[tuple[int, int]] = []
    build_model(checkpoint, CPU, torch.float32, lambda *call: calls.append(call))
    total = len({id(parameter) for parameter in reference.parameters()})
    assert calls == [(n, total) for n in range(1, total + 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_tensor_is_named(family: str) -> None:
    reference = make_model(family)
    checkpoint = MemoryCheckpoint(reference)
    name = next(n for n in reversed(checkpoint.tensors) if "norm" in n or "ln_" in n)
    del checkpoint.tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        build_model(checkpoint, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_stays_near_fp32(family: str, dtype: torch.dtype) -> None:
    reference = make_model(family)
    model = build_model(MemoryCheckpoint(reference), CPU, dtype)
    tokens = random_tokens(40)
    logits = PagedRunner(model, dtype=dtype).step({0: tokens}, all_logits=True)
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, tokens).log_softmax(-1)
    assert (logits.log_softmax(-1) - expected).abs().mean() < 0.15
