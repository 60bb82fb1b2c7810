from __future__ import annotations

import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_llama_folder

from legato.worker.config import WorkerConfig
from legato.worker.loading import load_model
from legato.worker.weights.fingerprint import PAGE_BYTES, fingerprint
from legato.worker.weights.open import open_checkpoint
from legato.worker.weights.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("model"))


def test_equal_for_equal_files_wherever_and_however_they_are_split(
    tmp_path: Path, folder: Path
) -> None:
    expected = open_checkpoint(folder).fingerprint
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_checkpoint(tmp_path / "elsewhere").fingerprint == expected
    resharded = make_llama_folder(tmp_path / "resharded", max_shard_size="200KB")
    assert open_checkpoint(resharded).fingerprint == expected


def test_every_single_weight_counts(tmp_path: Path, folder: Path) -> None:
    seen = {open_checkpoint(folder).fingerprint}
    tensors = load_file(folder / "model.safetensors")
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    for name in tensors:
        altered = dict(tensors)
        altered[name] = tensors[name].clone()
        altered[name].view(-1)[-1] += 1
        save_file(altered, changed / "model.safetensors")
        seen.add(open_checkpoint(changed).fingerprint)
    assert len(seen) == 1 + len(tensors)


def test_the_config_and_the_stored_dtype_count(tmp_path: Path, folder: Path) -> None:
    seen = {open_checkpoint(folder).fingerprint}
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    config = (changed / "config.json").read_text()
    (changed / "config.json").write_text(config.replace("1e-06", "1e-05"))
    seen.add(open_checkpoint(changed).fingerprint)
    (changed / "config.json").write_text(config)
    tensors = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for dtype in (torch.bfloat16, torch.float16):
        save_file({k: v.to(dtype) for k, v in tensors.items()}, changed / "model.safetensors")
        seen.add(open_checkpoint(changed).fingerprint)
    assert len(seen) == 4


def test_lowering_the_context_does_not_change_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.config = dataclasses.replace(checkpoint.config, context_length=32)
    assert checkpoint.fingerprint == open_checkpoint(folder).fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_the_weights_in_memory_does_not_change_it(folder: Path, dtype: str) -> None:
    loaded = load_model(WorkerConfig(model=str(folder), role="decode", device="cpu", dtype=dtype))
    assert (loaded.weights, loaded.fingerprint) == (dtype, open_checkpoint(folder).fingerprint)


def test_gguf(tmp_path: Path) -> None:
    seen = set()
    for number, (seed, kind) in enumerate([(0, "Q8_0"), (0, "Q4_0"), (1, "Q8_0"), (0, "Q8_0")]):
        file = tmp_path / f"{number}.gguf"
        write_gguf(file, make_llama(seed=seed), matrix_type=GGMLQuantizationType[kind])
        seen.add(open_checkpoint(file).fingerprint)
    assert len(seen) == 3  # the last is the first again


def test_large_models_are_sampled_at_both_ends_and_evenly_between(
    tmp_path: Path, folder: Path
) -> None:
    config = open_checkpoint(folder).config
    size = 100 * PAGE_BYTES
    file = tmp_path / "large"
    data = os.urandom(size)
    tensors = [StoredTensor("a", file, "F32", (size // 4,), 0, size)]

    def digest(changed_at: int | None, *, limit: int = size - 1) -> str:
        altered = bytearray(data)
        if changed_at is not None:
            altered[changed_at] ^= 1
        file.write_bytes(altered)
        return fingerprint(config, tensors, max_bytes_read_whole=limit)

    first = digest(None)
    step = (size - PAGE_BYTES) // 15
    for at in (0, PAGE_BYTES - 1, step, 7 * step + 100, size - PAGE_BYTES, size - 1):
        assert digest(at) != first
    assert digest(PAGE_BYTES) == first  # the documented price
    assert digest(PAGE_BYTES, limit=size) != digest(None, limit=size)
