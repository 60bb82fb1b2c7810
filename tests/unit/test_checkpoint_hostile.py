"""What a hostile folder or file says about itself: neither waited for, nor printed as it is."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors
from memory_checkpoint import MemoryCheckpoint
from model_checks import build, random_tokens
from paged_runner import PagedRunner
from quantized_folders import ct_parts, quantized_folder
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_llama_folder, make_model

from legato.worker.models.build import build_model
from legato.worker.models.config import (
    MAX_CONTEXT_LENGTH,
    MAX_LAYERS,
    MAX_SIZE,
    ModelConfig,
    RopeConfig,
)
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.gguf_header import GgufHeader
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.quoting import MAX_CHARS, bare, join_names, one_line, quoted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
LONG = "n" * 3_000_000
ODD = "a\nb\x1b[31m\u202ec\r"
BAD_NAMES = pytest.mark.parametrize("name", [LONG, ODD], ids=["long", "odd"])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(file, make_llama(num_hidden_layers=1)).read_bytes()


def refusal(path: Path) -> str:
    """The message; always short, and nothing that a terminal obeys."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 2000
    return message


# --- patterns of compressed-tensors ---------------------------------------------------------------


def ct_folder(folder: Path, *targets: str) -> Path:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    quantized_folder(
        folder, lambda i: ct_parts(i, 4, packed=True, symmetric=True), config, symmetric=True
    )
    return folder


@pytest.mark.timeout(60)
def test_a_pattern_that_re_cannot_finish_is_matched_at_once(tmp_path: Path) -> None:
    hostile = "re:^(([a-z0-9._]+)+)+!$"
    open_checkpoint(ct_folder(tmp_path / "other", hostile, "re:.*(attn|mlp).*"))
    assert "no scheme of" in refusal(ct_folder(tmp_path / "alone", hostile))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["re:(x"],
            "config_groups.group_0: targets holds 're:(x': is no regular",
        ),
        (["re:" + "x" * 5000], "has 5000 characters, at most 1000"),
        ([f"re:{'x' * 900}{index}" for index in range(5000)], "has 5000 entries, at most 1000"),
    ],
)
def test_other_patterns_are_refused_by_name(
    tmp_path: Path, targets: list[str], message: str
) -> None:
    assert message in refusal(ct_folder(tmp_path / "m", *targets))


# --- integers of a config -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63, 2**200])
def test_a_window_beyond_every_context_hides_nothing(family: str, window: int) -> None:
    reference = make_model(family)
    plain = build(reference)
    context = plain.config.context_length
    tokens = random_tokens(75)

    def logits(size: int) -> torch.Tensor:
        checkpoint = MemoryCheckpoint(reference)
        checkpoint.config = replace(checkpoint.config, layer_windows=(size, None, size))
        model = build_model(checkpoint, CPU, torch.float32)
        runner = PagedRunner(model, block_size=16)
        return torch.cat([runner.step({0: tokens}), runner.step({0: [5]})])

    assert torch.equal(logits(window), logits(context))


def config(**changes: Any) -> ModelConfig:  # noqa: ANN401  # of any field
    sizes = dict.fromkeys(
        ("num_layers", "num_heads", "num_kv_heads", "intermediate_size", "hidden_size"), 4
    )
    return ModelConfig(
        **{
            "architecture": "llama",
            "head_dim": 16,
            "vocab_size": 32,
            "context_length": 64,
            "norm_eps": 1e-5,
            "tie_word_embeddings": False,
            **sizes,
            **changes,
        }
    )


def test_every_integer_of_a_config_is_bounded() -> None:
    most = {"num_layers": MAX_LAYERS, "context_length": MAX_CONTEXT_LENGTH}
    names = [field.name for field in fields(ModelConfig) if field.type == "int"]
    assert len(names) == 9
    for name in names:
        for value in (most.get(name, MAX_SIZE) + 1, 2**63, 2**200, -1):
            with pytest.raises(ValueError, match=f"{name} must be"):
                config(**{name: value})
    names = [field.name for field in fields(RopeConfig) if field.type == "int"]
    assert names == ["original_context_length"]
    for value in (MAX_CONTEXT_LENGTH + 1, 2**200, 0):
        with pytest.raises(ValueError, match="original_context_length must be"):
            RopeConfig(original_context_length=value)


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_huge_numbers_in_a_folder_are_refused_by_name(
    tmp_path: Path, single: Path, field: str
) -> None:
    folder = shutil.copytree(single, tmp_path / "m")
    edit_json(folder / "config.json", **{field: 10**4000})
    message = refusal(folder)
    assert f"config.json: {field} must be a number of at most 64 bits, got 1000" in message
    edit_json(folder / "config.json", **{field: 2**62})
    assert "config.json: " in refusal(folder)


# --- what files say, in messages ------------------------------------------------------------------


def test_names_and_values_in_messages() -> None:
    assert bare("model.norm.weight") == "model.norm.weight"
    assert bare("größer") == "größer"
    assert bare(ODD) == repr(ODD)
    assert quoted("a b") == "'a b'"
    assert quoted([1, 2]) == "[1, 2]"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (LONG, ODD * 1_000_000, [LONG] * 1000, {LONG: LONG}, deep, b"\0" * 1_000_000):
        texts = [quoted(value), bare(value)] if isinstance(value, str) else [quoted(value)]
        assert all(len(text) <= MAX_CHARS + 1 and text.isprintable() for text in texts)
    names = join_names(f"{ODD}{index}" for index in range(1000))
    assert names.endswith(" and 995 more")
    assert names.isprintable()
    assert one_line(one_line(f"a {ODD}")) == one_line(f"a {ODD}")
    assert str(CheckpointError(f"x {ODD}")) == r"x a\nb\x1b[31m\u202ec\r"
    assert len(str(CheckpointError(LONG))) < 10_000


def index_with(folder: Path, name: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {name: next(iter(weight_map.values()))})


def index_without(folder: Path, name: str) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {name: torch.ones(2)}, shard, metadata={"format": "pt"})


def index_names_shard(folder: Path, name: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {"x": f"{name[:200]}.safetensors"})


def index_names_no_shard(folder: Path, name: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {"x": name})


@BAD_NAMES
@pytest.mark.parametrize(
    "damage", [index_with, index_without, index_names_shard, index_names_no_shard]
)
def test_names_in_an_index(
    tmp_path: Path, sharded: Path, damage: Callable[[Path, str], None], name: str
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "m")
    damage(folder, name)
    message = refusal(folder)
    assert ("nnnnn" if name is LONG else r"a\nb\x1b[31m") in message


def more_tensors(folder: Path, name: str) -> None:
    edit_tensors(folder, **{name: torch.ones(4)})


def rewrite_header(folder: Path, header: dict[str, Any], data_bytes: int) -> None:
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)
    )


def no_entry(folder: Path, name: str) -> None:
    rewrite_header(folder, {name: {"dtype": 1, "shape": 2, "data_offsets": 3}}, 0)


def wrong_entry(folder: Path, name: str) -> None:
    entry = {"dtype": "F32", "shape": [-1] * 100_000, "data_offsets": [name, name]}
    rewrite_header(folder, {name: entry}, 0)


def unknown_dtype(folder: Path, name: str) -> None:
    rewrite_header(folder, {name: {"dtype": name, "shape": [1], "data_offsets": [0, 4]}}, 4)


def many_dimensions(folder: Path, name: str) -> None:
    entry = {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}
    rewrite_header(folder, {"model.embed_tokens.weight": entry}, 4)


def stray_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / f"{name[:200]}.safetensors")


def setting(field: str) -> Callable[[Path, str], None]:
    def damage(folder: Path, name: str) -> None:
        edit_json(folder / "config.json", **{field: name})

    return damage


def architecture(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", architectures=[name])


def rope_type(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", rope_scaling={"rope_type": name})


def method(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": name})


def group_name(folder: Path, name: str) -> None:
    settings = {"quant_method": "compressed-tensors", "config_groups": {name: 1}}
    edit_json(folder / "config.json", quantization_config=settings)


@BAD_NAMES
@pytest.mark.parametrize(
    "damage",
    [
        more_tensors,
        no_entry,
        wrong_entry,
        unknown_dtype,
        many_dimensions,
        stray_name,
        architecture,
        rope_type,
        method,
        group_name,
        *map(setting, ("hidden_size", "hidden_act", "dtype", "model_type", "rope_theta")),
        *map(setting, ("rope_scaling", "mlp_bias", "is_causal")),
    ],
)
def test_names_and_values_of_a_folder(
    tmp_path: Path, single: Path, damage: Callable[[Path, str], None], name: str
) -> None:
    folder = shutil.copytree(single, tmp_path / "m")
    damage(folder, name)
    refusal(folder)


@BAD_NAMES
def test_names_in_a_gguf_file(tmp_path: Path, gguf: bytes, name: str) -> None:
    file = tmp_path / "m.gguf"
    old = b"blk.0.attn_norm.weight"
    raw = name.encode()
    at = gguf.index(old)
    # A longer header moves the data; the file is refused for the tensor's name before that.
    file.write_bytes(
        gguf[: at - 8] + struct.pack("<Q", len(raw)) + raw + gguf[at + len(old) :] + bytes(32)
    )
    refusal(file)


# --- bytes that belong to nothing -----------------------------------------------------------------


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path, gguf: bytes) -> None:
    file = tmp_path / "m.gguf"
    for stray in (1, 31, 32, 4096):
        file.write_bytes(gguf + bytes(stray))
        message = refusal(file)
        assert f"m.gguf: has {stray} bytes behind its last tensor" in message
        assert f"ends at byte {len(gguf)} with padding; the file has {len(gguf) + stray}" in message


def test_the_padding_of_the_last_tensor_may_be_missing(tmp_path: Path) -> None:
    model = make_llama(num_hidden_layers=1, vocab_size=319)
    whole = write_gguf(tmp_path / "whole.gguf", model)
    last = max(tensor.stop for tensor in GgufHeader.read(whole).tensors)
    data = whole.read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(last, len(data) + 1):
        file.write_bytes(data[:length])
        open_checkpoint(file)
    file.write_bytes(data[: last - 1])
    assert "is truncated" in refusal(file)


def test_bytes_between_tensors_are_refused(tmp_path: Path, gguf: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf)
    last = max(GgufHeader.read(file).tensors, key=lambda tensor: tensor.start)
    # In the header: the name, the number of dimensions, each of them, the type, the offset.
    name = struct.pack("<Q", len(last.name)) + last.name.encode()
    at = gguf.index(name) + len(name) + 4 + 8 * len(last.shape) + 4
    (offset,) = struct.unpack_from("<Q", gguf, at)
    moved = gguf[:at] + struct.pack("<Q", offset + 64) + gguf[at + 8 :]
    file.write_bytes(moved[: last.start] + bytes(64) + moved[last.start :])
    assert f"has 64 bytes before tensor {last.name} that belong to none" in refusal(file)
