from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import read_all
from demo_model import demo_model_path, transformers_from_gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from quick_gguf import quick_gguf
from tiny_gguf import pairs_from_halves, write_gguf
from tiny_models import make_llama

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.gguf_header import GgufArray, GgufHeader
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from pathlib import Path


Kind = GGMLQuantizationType


def test_demo_model_equals_transformers_reading_of_it() -> None:
    file = demo_model_path()
    ours = read_all(open_checkpoint(file))
    model = transformers_from_gguf(file)
    theirs = model.state_dict()
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}  # tied
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
    config = open_checkpoint(file).config
    assert config.rope.theta == model.config.rope_parameters["rope_theta"]
    assert config.norm_eps == model.config.rms_norm_eps
    assert config.context_length == model.config.max_position_embeddings
    assert config.vocab_size == model.config.vocab_size


def test_header_agrees_with_the_gguf_package_on_the_demo_model() -> None:
    header = GgufHeader.read(demo_model_path())
    with quick_gguf():
        reader = GGUFReader(demo_model_path())
    assert [(t.name, t.dtype, t.shape, t.start, t.num_bytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]
    for key, value in header.metadata.items():
        field = reader.fields[key]
        if isinstance(value, GgufArray):
            assert (value.value_type, value.length) == (field.types[-1].name, len(field.data))
        else:
            assert value == field.contents()
    assert len(header.metadata) == len(reader.fields) - 3  # it counts version and counts as keys


@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_every_tensor_comes_back_in_its_order(tmp_path: Path, kind: Kind) -> None:
    model = make_llama(attention_bias=True, mlp_bias=True)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, matrix_type=kind))
    ours = read_all(checkpoint)
    assert ours.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        expected = parameter.detach().numpy()
        if expected.ndim > 1:  # rows are quantised one by one, so their order does not matter
            expected = dequantize(quantize(expected, kind), kind)
        torch.testing.assert_close(ours[name], torch.from_numpy(expected), rtol=0, atol=0)
    config = checkpoint.config
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name
)
def test_k_quants(tmp_path: Path, kind: Kind) -> None:
    # The package cannot quantise to these, so take any bytes whose scales are finite halves.
    model = make_llama(hidden_size=256, num_hidden_layers=1)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 0x3C, (256, block_bytes), dtype=np.uint8)
    name = "blk.0.attn_q.weight"
    file = write_gguf(tmp_path / "m.gguf", model, tensors={name: raw}, raw_types={name: kind})
    ours = open_checkpoint(file).tensor(
        "model.layers.0.self_attn.q_proj.weight", (256, 256), torch.float32
    )
    assert ours.std() > 0
    np.testing.assert_array_equal(pairs_from_halves(ours.numpy(), 4), dequantize(raw, kind))


def test_target_dtype(tmp_path: Path) -> None:
    model = make_llama()
    file = write_gguf(tmp_path / "m.gguf", model, matrix_type=Kind.Q8_0)
    exact = read_all(open_checkpoint(file))
    for name, tensor in read_all(open_checkpoint(file), torch.bfloat16).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].bfloat16())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.bfloat16),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_native_dtype(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_llama(), matrix_type=kind)
    assert open_checkpoint(file).native_dtype == dtype


def test_tied_head_and_other_head_dim(tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True, head_dim=32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.config.head_dim == 32
    assert "lm_head.weight" not in read_all(checkpoint)


# llama.cpp's converter writes llama3 scaling as a tensor of divisors.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rope_freqs_is_recognised_as_llama3(tmp_path: Path) -> None:
    model = make_llama(head_dim=64, rope_parameters=dict(LLAMA3))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    divisors = plain / model.model.rotary_emb.inv_freq  # transformers' own rule
    assert any(1.1 < divisor < 7.9 for divisor in divisors)  # interpolated: the hard part
    file = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": divisors.numpy()})
    checkpoint = open_checkpoint(file)
    read_all(checkpoint)
    rope = checkpoint.config.rope
    assert (rope.kind, rope.theta, rope.original_context_length) == ("llama3", 500000.0, 8192)
    assert rope.factor == pytest.approx(8.0, rel=1e-6)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)

    whole = divisors.numpy()
    for bad in (whole**1.1, whole[:-1], whole * 0, whole * np.nan, whole[:0], whole.reshape(2, 16)):
        file = write_gguf(tmp_path / "bad.gguf", model, tensors={"rope_freqs.weight": bad})
        with pytest.raises(CheckpointError, match=r"bad\.gguf: tensor rope_freqs\.weight"):
            open_checkpoint(file)


def test_linear_scaling(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = open_checkpoint(write_gguf(tmp_path / "a.gguf", make_llama(), metadata=keys)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    keys = {"llama.rope.scale_linear": 4.0}
    old = open_checkpoint(write_gguf(tmp_path / "b.gguf", make_llama(), metadata=keys)).config.rope
    assert old == rope


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor is 2.0"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window_pattern": 6}, "sliding_window_pattern is 6"),
        ({"split.count": 3}, "split.count is 3"),
        ({"llama.attention.causal": False}, "llama.attention.causal is false"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 10**9}, "llama.block_count must be from 1 to 10000"),
        ({"llama.block_count": 2}, "no place for tensor model.layers.2."),
        ({"llama.embedding_length": 32}, "embed_tokens.weight has shape [320, 64]"),
        ({"llama.attention.head_count": [4, 4, 4]}, "head_count must be a whole number"),
        ({"llama.attention.head_count": 0}, "head_count must be at least 1, got 0"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads 3"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "finite number above 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_cannot_be_served(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", make_llama(), metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert "bad.gguf: " in str(caught.value)
    assert message in str(caught.value)


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_llama())
    data = file.read_bytes()
    file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0falco", 1))
    with pytest.raises(
        CheckpointError, match=r"architecture is 'falco'; supported are llama, qwen2, "
    ):
        open_checkpoint(file)


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.ones((rows, columns), dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "model.layers.1.self_attn.k_proj.weight of shape [32, 64]"),
        ({"output_norm.weight": None}, "model.norm.weight"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
        ({"blk.0.ffn_up.weight": matrix(128, 32)}, "up_proj.weight has shape [128, 32]"),
        ({"blk.7.attn_q.weight": matrix(64, 64)}, "tensor model.layers.7.self_attn.q_proj.weight"),
        ({"mystery.weight": matrix(2, 2)}, "no place for tensor mystery.weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_missing_extra_or_misshapen_tensor(
    tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "bad.gguf", make_llama(), tensors=tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(file)
    assert "bad.gguf: " in str(caught.value)
    assert message in str(caught.value)


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    raw = np.zeros((64, 136), dtype=np.uint8)
    file = write_gguf(
        tmp_path / "m.gguf", make_llama(), tensors={name: raw}, raw_types={name: Kind.IQ4_XS}
    )
    with pytest.raises(CheckpointError, match=rf"{name} has type IQ4_XS; supported are F32, "):
        open_checkpoint(file)


def test_nan_is_refused(tmp_path: Path) -> None:
    norm = np.ones(64, dtype=np.float32)
    norm[3] = np.nan
    file = write_gguf(tmp_path / "m.gguf", make_llama(), tensors={"blk.2.ffn_norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*blk\.2\.ffn_norm.*NaN"):
        read_all(open_checkpoint(file))


def test_unread_tensor_is_named_at_finish(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", make_llama()))
    for name, shape in model_tensors(checkpoint.config):
        if name != "model.norm.weight":
            checkpoint.tensor(name, shape, torch.float32)
    with pytest.raises(CheckpointError, match=r"m\.gguf: the model never read tensor model\.norm"):
        checkpoint.finish()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf", make_llama(num_hidden_layers=1)).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in [0, 1, 3, 4, 8, 23, 24, 100, 1000, 5000, len(data) // 2, len(data) - 64]:
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: "):
            open_checkpoint(file)


def test_corrupt_counts_and_lengths_are_refused_at_once(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf", make_llama(num_hidden_layers=1)).read_bytes()
    # After the key: the type "array", the type "string", the number of strings, the first one.
    num_tokens = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    file = tmp_path / "corrupt.gguf"
    for at in (8, 16, 24, num_tokens, num_tokens + 8):
        file.write_bytes(data[:at] + struct.pack("<Q", 1 << 62) + data[at + 8 :])
        with pytest.raises(CheckpointError, match=r"corrupt\.gguf: "):
            open_checkpoint(file)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf", make_llama(num_hidden_layers=1)).read_bytes()
    header_bytes = min(t.start for t in GgufHeader.read(tmp_path / "whole.gguf").tensors)
    rng = np.random.default_rng(0)
    file = tmp_path / "damaged.gguf"
    messages = []
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(rng.integers(0, header_bytes))] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            open_checkpoint(file)
        except CheckpointError as error:
            messages.append(str(error))
    assert all("damaged.gguf: " in message for message in messages)
    assert len(messages) > 50  # a part of the bytes are tokens, where damage cannot be seen
