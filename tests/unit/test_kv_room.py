"""check_kv_memory: too little KV memory is refused before Ray is started, and never too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from served import legato
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_model_folder

from legato.cluster.actors.kv_room import check_kv_memory
from legato.cluster.config import EngineOptions
from legato.worker.config import WorkerConfig
from legato.worker.kv.cache import KvShape
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

FORMS = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "auto", "device": "cpu"},
    {"dtype": "bfloat16", "block_size": 4},
    {"dtype": "float32", "kv_cache": "int8"},
)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(params=["llama", "gemma3", "gpt2", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, make_llama())
        return path
    return make_model_folder(tmp_path / "model", request.param)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_least_is_a_workers_own_block(model: Path, form: dict[str, str]) -> None:
    config = WorkerConfig(model=str(model), role="decode", **form)  # type: ignore[arg-type]  # of many types
    dtype = DTYPES.get(form["dtype"], torch.float32)
    shape = KvShape.of(open_checkpoint(model).config, config, dtype)

    def engine(num_bytes: int) -> EngineOptions:
        return EngineOptions(kv_memory_bytes=num_bytes, **form)  # type: ignore[arg-type]  # as above

    least = shape.bytes_per_block
    check_kv_memory(model, [engine(least)])
    with pytest.raises(ValueError, match=f"--kv-memory is {least - 1} bytes and .* {least} or"):
        check_kv_memory(model, [engine(least), engine(least - 1)])


def test_what_it_cannot_know_is_left_to_the_workers(tmp_path: Path) -> None:
    little = EngineOptions(kv_memory_bytes=1)
    check_kv_memory(tmp_path, [little])
    (tmp_path / "config.json").write_text("{}")
    check_kv_memory(tmp_path, [little])
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    check_kv_memory(tmp_path / "m.gguf", [little])
    folder = make_model_folder(tmp_path / "model", "llama")
    check_kv_memory(folder, [EngineOptions(kv_memory_bytes=1, kv_memory_fraction=0.5)])


def test_the_command_says_so_before_ray_is_started(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    done = legato("serve", "--model", str(folder), "--port", "0", "--kv-memory", "1KiB")
    assert done.returncode == 1
    assert done.stderr.startswith("legato: --kv-memory is 1024 bytes and holds no block of this")
    assert done.stderr.count("\n") == 1
