"""check_room: too little KV memory is refused before Ray is started, and never too much."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from served import legato
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_model_folder

from legato.cluster.actors import kv_room
from legato.cluster.actors.kv_room import check_room, own_memory
from legato.cluster.config import EngineOptions
from legato.cluster.errors import WrongInputError
from legato.worker.config import WorkerConfig
from legato.worker.device_memory import total_bytes
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
    check_room(model, [engine(least)])
    with pytest.raises(
        WrongInputError, match=f"--kv-memory is {least - 1} bytes and .* {least} or"
    ):
        check_room(model, [engine(least), engine(least - 1)])


def test_what_it_cannot_know_is_left_to_the_workers(tmp_path: Path) -> None:
    little = EngineOptions(kv_memory_bytes=1)
    check_room(tmp_path, [little])
    (tmp_path / "config.json").write_text("{}")
    check_room(tmp_path, [little])
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    check_room(tmp_path / "m.gguf", [little])
    folder = make_model_folder(tmp_path / "model", "llama")
    check_room(folder, [EngineOptions(kv_memory_bytes=1, kv_memory_fraction=0.5)])


def test_more_memory_than_there_is_and_a_longer_context_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = open_checkpoint(model).config.context_length
    check_room(model, [EngineOptions(context_length=longest)])
    with pytest.raises(
        WrongInputError, match=f"--context-length is {longest + 1}, limit {longest}: the model's"
    ):
        check_room(model, [EngineOptions(), EngineOptions(context_length=longest + 1)])
    most = own_memory()
    assert most == total_bytes(torch.device("cpu"))
    on_cpu = EngineOptions(device="cpu", kv_memory_bytes=most)
    check_room(model, [on_cpu], most_bytes=most)
    too_much = replace(on_cpu, kv_memory_bytes=most + 1)
    with pytest.raises(WrongInputError, match=f"--kv-memory is {most + 1} bytes, limit {most}: "):
        check_room(tmp_path, [on_cpu, too_much], most_bytes=most)
    check_room(model, [too_much])  # workers are elsewhere
    check_room(model, [replace(too_much, device="cuda")], most_bytes=most)
    for there in (True, False):
        driver = tmp_path / str(there)
        if there:
            driver.touch()
        monkeypatch.setattr(kv_room, "_GPU_DRIVER", driver)
        with nullcontext() if there else pytest.raises(WrongInputError):
            check_room(model, [replace(too_much, device="auto")], most_bytes=most)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kv-memory", "1KiB"), "--kv-memory is 1024 bytes and holds no block of this"),
        (("--kv-memory", "900TiB"), "--kv-memory is 989560464998400 bytes, limit "),
        (("--context-length", "100000"), "--context-length is 100000, limit "),
    ],
)
def test_the_command_says_so_before_ray_is_started(
    tmp_path: Path, words: tuple[str, str], said: str
) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    done = legato("serve", "--model", str(folder), "--port", "0", "--device", "cpu", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"legato: {said}")
    assert done.stderr.count("\n") == 1
