from __future__ import annotations

import json
import os
import shutil
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import edit_json, edit_tensors, read_all
from tiny_models import make_llama_folder

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama_folder(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


# B44: nothing incomplete, damaged or unsupported loads. Each case: the damage, what the message
# must name, and whether it is found before any weight is read.


def delete_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def truncate_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)


def truncate_shard_inside_its_header(folder: Path) -> None:
    os.truncate(sorted(folder.glob("*.safetensors"))[1], 100)


def empty_shard(folder: Path) -> None:
    os.truncate(sorted(folder.glob("*.safetensors"))[1], 0)


def append_to_shard(folder: Path) -> None:
    with sorted(folder.glob("*.safetensors"))[1].open("ab") as opened:
        opened.write(bytes(64))


def garble_header(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:8] + b"!" + data[9:])


def fill_header(folder: Path) -> None:
    """Valid JSON, but as Python's objects it would take gigabytes."""
    header = b'{"a":[' + b"{}," * (6 << 20) + b"1]}"
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(struct.pack("<Q", len(header)) + header)


def claim_huge_header(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(struct.pack("<Q", 1 << 60) + shard.read_bytes()[8:])


def change_weight_map(folder: Path, name: str, shard: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = shard
    if shard is None:
        del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def index_names_missing_file(folder: Path) -> None:
    change_weight_map(folder, DOWN, "model-00009-of-00009.safetensors")


def index_names_file_elsewhere(folder: Path) -> None:
    change_weight_map(folder, DOWN, "../model.safetensors")


def index_names_no_string(folder: Path) -> None:
    change_weight_map(folder, DOWN, ["a"])


def index_names_tensor_that_is_not_there(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0].name
    change_weight_map(folder, "model.layers.9.mlp.up_proj.weight", shard)


def index_leaves_out_tensor(folder: Path) -> None:
    change_weight_map(folder, DOWN, None)


def index_names_file_that_no_system_has(folder: Path) -> None:
    change_weight_map(folder, DOWN, f"{'x' * 300}.safetensors")


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def replace_shard_by_directory(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    shard.mkdir()


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (delete_shard, ["model-00002", "is missing"]),
        (truncate_shard, ["model-00002", "is truncated"]),
        (truncate_shard_inside_its_header, ["model-00002", "is truncated"]),
        (empty_shard, ["model-00002", "is truncated: only 0 bytes"]),
        (append_to_shard, ["model-00002", "64 bytes"]),
        (garble_header, ["model-00002", "malformed header"]),
        (claim_huge_header, ["model-00002", "at most 16777216"]),
        (fill_header, ["model-00002", "at most 16777216"]),
        (index_names_missing_file, ["model-00009-of-00009.safetensors", "is missing"]),
        (index_names_file_elsewhere, [INDEX, "'../model.safetensors'"]),
        (index_names_file_that_no_system_has, [INDEX, "a shard of more than 255 bytes"]),
        (index_names_no_string, [INDEX, "file names"]),
        (index_names_tensor_that_is_not_there, [INDEX, "model.layers.9.mlp.up_proj.weight"]),
        (index_leaves_out_tensor, [DOWN, INDEX]),
        (break_index, [INDEX, "not valid JSON"]),
        (empty_index, [INDEX, "no weight_map"]),
        (replace_shard_by_directory, ["model-00002", "is not a file"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_b44_damaged_shards_are_refused_at_open(
    tmp_path: Path, sharded: Path, damage: Callable[[Path], None], names: list[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    for name in names:
        assert name in str(caught.value)


def drop_tensor(folder: Path) -> None:
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=None)


def add_tensor(folder: Path) -> None:
    edit_tensors(folder, model__layers__1__mlp__down_proj__scales=torch.ones(4))


def reshape_tensor(folder: Path) -> None:
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=torch.ones(64, 64))


def store_as_fp8(folder: Path) -> None:
    weight = torch.ones(64, 128).to(torch.float8_e4m3fn)
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=weight)


def add_directory(folder: Path) -> None:
    (folder / "x.safetensors").mkdir()


def pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def gguf_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.Q4_0.gguf")


def other_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def config_is_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_is_directory(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def config_is_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def config_is_endless(folder: Path) -> None:
    with (folder / "config.json").open("ab") as opened:
        opened.truncate(1 << 40)  # takes no disk


def quantised(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (drop_tensor, [DOWN, "missing"]),
        (add_tensor, ["model.safetensors", "model.layers.1.mlp.down_proj.scales"]),
        (reshape_tensor, ["model.safetensors", DOWN, "[64, 64]", "[64, 128]"]),
        (store_as_fp8, ["model.safetensors", DOWN, "F8_E4M3", "F32, BF16, F16"]),
        (add_directory, ["x.safetensors", "is not a file"]),
        (pickles_only, ["pytorch_model.bin", "convert them to safetensors"]),
        (gguf_only, ["model.Q4_0.gguf", "path of the .gguf file itself"]),
        (other_name, ["weights.safetensors", "must be called model.safetensors"]),
        (no_weights, ["no weights"]),
        (config_is_no_json, ["config.json", "not valid JSON"]),
        (config_is_list, ["config.json", "must hold a JSON object"]),
        (config_is_directory, ["config.json", "cannot be read"]),
        (config_is_pipe, ["config.json", "it is not a file"]),
        (config_is_endless, ["config.json", "is larger than 16777216 bytes"]),
        (quantised, ["config.json: quantization_config", "quantised, but", "*.qweight"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_b44_damaged_folder_is_refused_at_open(
    tmp_path: Path, single: Path, damage: Callable[[Path], None], names: list[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, -1])
def test_b44_nan_and_infinity_are_refused_when_read(
    tmp_path: Path, single: Path, value: float, at: int
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    weight = torch.ones(64, 128)
    weight.view(-1)[at] = value
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=weight)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {DOWN} holds NaN or"):
        read_all(checkpoint)


def test_a_config_that_claims_a_billion_layers_is_refused_at_once(
    tmp_path: Path, single: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    edit_json(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="num_hidden_layers must be from 1 to 10000"):
        open_checkpoint(folder)


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(
    tmp_path: Path, single: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was cut short at tensor"):
        read_all(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.float64, "F64")],
)
def test_a_head_of_another_dtype_beside_a_tied_embedding_is_refused(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    folder = make_llama_folder(tmp_path / "model", tie_word_embeddings=True)
    edit_tensors(folder, lm_head__weight=torch.ones(320, 64).to(dtype))
    with pytest.raises(CheckpointError, match=rf"tensor lm_head\.weight has dtype {name}"):
        open_checkpoint(folder)


def test_a_very_long_name_is_shortened(tmp_path: Path, single: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    edit_tensors(folder, **{"n" * 1_000_000: torch.ones(4)})
    with pytest.raises(CheckpointError, match="no place for tensor nnn") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 1000
