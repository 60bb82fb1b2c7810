"""Loading a model takes little more memory than the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from legato.worker.models.hf_config import model_config
from legato.worker.weights.tensor_table import model_tensors

if TYPE_CHECKING:
    from pathlib import Path

# Its peak in bytes above what the process had before, once everything is imported.
PROGRAM = """
import sys
import torch
import legato.worker.models.build
from legato.worker.config import WorkerConfig
from legato.worker.loading import load_model

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

torch.ones(1000, 1000).sum()
before = status("VmRSS")
loaded = load_model(WorkerConfig(model=sys.argv[1], role="decode", device="cpu", dtype=sys.argv[2]))
print(status("VmHWM") - before)
"""
SLACK_BYTES = 24 << 20  # the compiled kernels, and the matrix at hand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 MB in bf16, in two files: several times what the process needs besides."""
    folder = tmp_path_factory.mktemp("model")
    values = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (name, shape) in enumerate(model_tensors(model_config(values, "test"))):
        shards[number % 2][name] = torch.full(shape, 0.01, dtype=torch.bfloat16)
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_peak_is_at_most_a_fifth_above_the_weights(folder: Path, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), dtype],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights = stored * (1 if dtype == "bfloat16" else 2)
    assert int(done.stdout) < 1.2 * weights + SLACK_BYTES
