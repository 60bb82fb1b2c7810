from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from memory_checkpoint import MemoryCheckpoint
from model_checks import (
    BLOCK_SIZE,
    assert_same,
    build,
    check_prefill_then_decode,
    random_tokens,
    reference_logits,
)
from paged_runner import PagedRunner
from tiny_models import VOCAB_SIZE, make_llama

from legato.worker.models.build import build_model
from legato.worker.models.config import RopeConfig
from legato.worker.models.rope import inverse_frequencies
from legato.worker.weights.checkpoint import CheckpointError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from legato.worker.forward import Model

CPU = torch.device("cpu")


def both(**overrides: Any) -> tuple[LlamaForCausalLM, Model]:  # noqa: ANN401  # to LlamaConfig
    reference = make_llama(**overrides)
    return reference, build(reference)


@pytest.fixture(scope="module")
def pair() -> tuple[LlamaForCausalLM, Model]:
    return both()


@pytest.mark.parametrize("length", range(1, 3 * BLOCK_SIZE + 2))
def test_prefill_and_decode_at_every_length_over_three_blocks(
    pair: tuple[LlamaForCausalLM, Model], length: int
) -> None:
    check_prefill_then_decode(*pair, length)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (4, 2), (9, 3), (4, 1), (12, 1)], ids=lambda n: str(n)
)
def test_gqa_groups(heads: int, kv_heads: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    check_prefill_then_decode(*both(**sizes, hidden_size=heads * 8), 20)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_head_dims_that_are_not_hidden_size_over_heads(head_dim: int) -> None:
    check_prefill_then_decode(*both(head_dim=head_dim), 20)


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_biases_and_heads(*, attention_bias: bool, mlp_bias: bool, tied: bool) -> None:
    check_prefill_then_decode(
        *both(attention_bias=attention_bias, mlp_bias=mlp_bias, tie_word_embeddings=tied), 20
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 2.0,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_kinds_past_the_original_context(rope: dict[str, Any]) -> None:
    # head_dim 64 gives llama3 frequencies in all three of its bands.
    reference, model = both(rope_parameters=rope, head_dim=64)
    for length in (40, 63, 65, 300):
        check_prefill_then_decode(reference, model, length, steps=2)


def test_exact_frequencies() -> None:
    linear = inverse_frequencies(RopeConfig(kind="linear", factor=2.0), 16)
    assert linear[0] == 0.5
    llama3 = RopeConfig(kind="llama3", factor=8.0, original_context_length=64)
    plain, scaled = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(llama3, 64)
    assert scaled[0] == plain[0]  # wavelength 6, shorter than 64 / 4
    assert scaled[-1] == plain[-1] / 8  # longer than 64
    assert ((scaled < plain) & (scaled > plain / 8)).any()  # and some between
    unknown = dataclasses.replace(llama3, kind="longrope")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="'longrope'"):
        inverse_frequencies(unknown, 64)


@pytest.mark.parametrize("chunk", [1, 16, 23, 70])
def test_chunked_prefill(pair: tuple[LlamaForCausalLM, Model], chunk: int) -> None:
    reference, model = pair
    tokens = random_tokens(70)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    logits = [
        runner.step({0: tokens[start : start + chunk]}, all_logits=True)
        for start in range(0, len(tokens), chunk)
    ]
    assert_same(torch.cat(logits), reference_logits(reference, tokens))


def test_a_chunk_without_logits(pair: tuple[LlamaForCausalLM, Model]) -> None:
    reference, model = pair
    tokens = random_tokens(40)
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    assert runner.step({0: tokens[:30]}, logits=False).shape == (0, VOCAB_SIZE)
    assert_same(runner.step({0: tokens[30:]}), reference_logits(reference, tokens)[-1:])


def test_packed_prompts_then_a_mixed_batch_then_decode(
    pair: tuple[LlamaForCausalLM, Model],
) -> None:
    reference, model = pair
    lengths = [1, 33, 16, 90, 7]
    tokens = {s: random_tokens(length + 20, seed=s) for s, length in enumerate(lengths)}
    expected = {s: reference_logits(reference, ids) for s, ids in tokens.items()}
    runner = PagedRunner(model, block_size=BLOCK_SIZE)
    packed = runner.step({s: ids[: lengths[s]] for s, ids in tokens.items()})
    assert_same(packed, torch.stack([expected[s][n - 1] for s, n in enumerate(lengths)]))
    # Chunks of different sizes on different prefixes, one of a single token.
    done = [length + extra for length, extra in zip(lengths, [3, 1, 16, 2, 9], strict=True)]
    mixed = runner.step({s: ids[lengths[s] : done[s]] for s, ids in tokens.items()})
    assert_same(mixed, torch.stack([expected[s][n - 1] for s, n in enumerate(done)]))
    for step in range(4):
        # Batches in changing order and company.
        members = [s for s in (3, 0, 4, 2, 1) if s != step]
        logits = runner.step({s: [tokens[s][done[s]]] for s in members})
        assert_same(logits, torch.stack([expected[s][done[s]] for s in members]))
        for s in members:
            done[s] += 1


def test_neighbours_never_change_a_decode_step(pair: tuple[LlamaForCausalLM, Model]) -> None:
    _, model = pair
    prompts = {s: random_tokens(length, seed=s) for s, length in enumerate([5, 40, 17])}
    together, alone = (PagedRunner(model, block_size=BLOCK_SIZE) for _ in range(2))
    for runner in (together, alone):
        runner.step(prompts)
    crowd = together.step({s: [s + 60] for s in prompts})
    single = torch.cat([alone.step({s: [s + 60]}) for s in prompts])
    torch.testing.assert_close(crowd, single, rtol=1e-5, atol=1e-5)


def test_a_lost_row_of_kv_or_a_shifted_position_would_be_seen(
    pair: tuple[LlamaForCausalLM, Model],
) -> None:
    reference, model = pair
    tokens = random_tokens(41)
    expected = reference_logits(reference, tokens)[-1:]

    lost = PagedRunner(model, block_size=BLOCK_SIZE)
    lost.step({0: tokens[:-1]})
    slot = lost.slot(0, 17)
    for pages in (t for layer in lost.cache.layers for t in (layer.k, layer.v)):
        pages[slot] = 0
    with pytest.raises(AssertionError, match="not close"):
        assert_same(lost.step({0: tokens[-1:]}), expected)

    shifted = PagedRunner(model, block_size=BLOCK_SIZE)
    shifted.step({0: tokens[:-1]})
    with pytest.raises(AssertionError, match="not close"):
        assert_same(shifted.step({0: tokens[-1:]}, position_offset=1), expected)


def test_bfloat16_stays_near_fp32(pair: tuple[LlamaForCausalLM, Model]) -> None:
    reference, _ = pair
    model = build_model(MemoryCheckpoint(reference), CPU, torch.bfloat16)
    runner = PagedRunner(model, dtype=torch.bfloat16)
    tokens = random_tokens(40)
    logits = runner.step({0: tokens}, all_logits=True)
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, tokens).log_softmax(-1)
    assert (logits.log_softmax(-1) - expected).abs().mean() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_the_triton_kernels_to_the_same_logits() -> None:
    reference = make_llama(head_dim=80)
    model = build(reference, "cuda")
    tokens = {s: random_tokens(length + 1, seed=s) for s, length in enumerate([1, 33, 70])}
    runner = PagedRunner(model, device="cuda")
    expected = [reference_logits(reference, ids) for ids in tokens.values()]
    packed = runner.step({s: ids[:-1] for s, ids in tokens.items()})
    torch.testing.assert_close(
        packed.cpu(), torch.stack([logits[-2] for logits in expected]), rtol=1e-3, atol=1e-3
    )
    decoded = runner.step({s: ids[-1:] for s, ids in tokens.items()})
    torch.testing.assert_close(
        decoded.cpu(), torch.stack([logits[-1] for logits in expected]), rtol=1e-3, atol=1e-3
    )


def test_progress_counts_every_tensor_once() -> None:
    for settings in (
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ):
        reference = make_llama(num_hidden_layers=2, **settings)
        calls: list[tuple[int, int]] = []
        build_model(
            MemoryCheckpoint(reference),
            CPU,
            torch.float32,
            lambda done, total, calls=calls: calls.append((done, total)),
        )
        total = len({id(parameter) for parameter in reference.parameters()})
        assert calls == [(n, total) for n in range(1, total + 1)]


def test_an_unknown_architecture_and_a_missing_tensor_are_named() -> None:
    reference = make_llama(num_hidden_layers=1)
    checkpoint = MemoryCheckpoint(reference)
    checkpoint.config = dataclasses.replace(checkpoint.config, architecture="mamba")
    with pytest.raises(CheckpointError, match="'mamba' is not supported; supported: llama, qwen2"):
        build_model(checkpoint, CPU, torch.float32)
    checkpoint = MemoryCheckpoint(reference)
    checkpoint.config = dataclasses.replace(checkpoint.config, num_layers=2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* is missing"):
        build_model(checkpoint, CPU, torch.float32)


def test_a_cpu_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import legato.worker.models.build, legato.worker.sampler, torch\n"
        "from legato.kernels.rms_norm import rms_norm\n"
        "print(rms_norm(torch.ones(1, 2), torch.ones(2), 0.0).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[[1.0, 1.0]]\n", done.stderr
