from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGMLQuantizationType
from tiny_gguf import write_gguf
from tiny_models import make_llama, make_llama_folder

from legato.worker.config import WorkerConfig
from legato.worker.loading import choose_device, choose_dtype, load_model
from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.open import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from legato.worker.models.config import ModelConfig
    from legato.worker.weights.checkpoint import Checkpoint


class FakeModel:
    """What `build_model` was asked for."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype


@pytest.fixture(autouse=True)
def fake_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is tested here, the models elsewhere."""

    def build_model(
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Any = None,  # noqa: ANN401  # a callable or None
        form: Any = None,  # noqa: ANN401  # a MatrixForm
    ) -> FakeModel:
        if on_progress is not None:
            on_progress(1, 1)
        return FakeModel(checkpoint.config, device, dtype)

    module = ModuleType("legato.worker.models.build")
    module.build_model = build_model  # type: ignore[attr-defined]  # a module made up on the spot
    monkeypatch.setitem(sys.modules, "legato.worker.models.build", module)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_folder(tmp_path_factory.mktemp("model"))


def worker(model: Path | str, **changes: Any) -> WorkerConfig:  # noqa: ANN401  # WorkerConfig's fields
    return WorkerConfig(**{"model": str(model), "role": "decode", "device": "cpu", **changes})


def test_loads_on_a_cpu_in_float32(folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    loaded = load_model(worker(folder), lambda done, total: progress.append((done, total)))
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.source == folder
    assert loaded.fingerprint == open_checkpoint(folder).fingerprint
    assert isinstance(loaded.model, FakeModel)
    assert (loaded.model.device, loaded.model.dtype) == (loaded.device, loaded.dtype)
    assert loaded.model.config == open_checkpoint(folder).config
    assert progress == [(1, 1)]


def test_context_length_can_be_lowered_but_not_raised(folder: Path) -> None:
    whole = load_model(worker(folder, context_length=512))
    lowered = load_model(worker(folder, context_length=100))
    assert (whole.model.config.context_length, lowered.model.config.context_length) == (512, 100)
    assert lowered.fingerprint == whole.fingerprint
    with pytest.raises(ValueError, match="context_length 513 is beyond the model's own 512"):
        load_model(worker(folder, context_length=513))


def test_kv_memory_that_holds_no_block_is_refused_before_the_weights_are_read(
    folder: Path,
) -> None:
    progress: list[tuple[int, int]] = []
    too_little = worker(folder, kv_memory_bytes=1024)
    with pytest.raises(ValueError, match=r"kv_memory_bytes 1024 holds no block: .* takes 12288 "):
        load_model(too_little, lambda done, total: progress.append((done, total)))
    assert progress == []


def test_explicit_dtype(folder: Path) -> None:
    assert load_model(worker(folder, dtype="bfloat16")).dtype == torch.bfloat16


def test_auto_dtype_is_native_only_on_an_accelerator(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", make_llama(), matrix_type=GGMLQuantizationType.Q8_0)
    native = open_checkpoint(file).native_dtype
    assert choose_dtype("auto", torch.device("cuda"), native) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cpu"), native) == torch.float32
    assert choose_dtype("float16", torch.device("cuda"), native) == torch.float16


def test_device_without_cuda(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'cuda' was asked for, but torch sees no CUDA"):
        load_model(worker(folder, device="cuda"))
    for name in ("mps", "cuda:", "cuda:x", "CPU", ""):
        with pytest.raises(ValueError, match=f"must be auto, cpu, cuda or cuda:N, got '{name}'"):
            choose_device(name)


def test_device_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"'cuda:2' was asked for, but there are only 2"):
        choose_device("cuda:2")


def test_a_missing_model_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        load_model(worker(tmp_path / "none"))
