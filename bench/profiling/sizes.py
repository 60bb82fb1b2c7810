"""Sizes: loads a model as a worker does, and prints its bytes as one JSON line; then it is gone.

python -m legato.bench.profiling.sizes --model demo --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch

from legato.bench.loaded_cost import loaded_cost
from legato.worker.config import WorkerConfig
from legato.worker.device_memory import total_bytes
from legato.worker.kv.cache import KvShape
from legato.worker.loading import load_model

_CPU_INFO = Path("/proc/cpuinfo")


def main() -> int:
    """Prints the JSON line, or what is wrong with the model on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("model", "device", "dtype", "weights", "kv-cache"):
        parser.add_argument(f"--{name}", default="auto")
    args = parser.parse_args()
    try:
        config = WorkerConfig(
            model=args.model,
            role="decode",
            device=args.device,
            dtype=args.dtype,
            weights=args.weights,
            kv_cache=args.kv_cache,
            kv_memory_fraction=1.0,
        )
        loaded = load_model(config)
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    shape = KvShape.of(loaded.model.config, config, loaded.dtype)
    cost = loaded_cost(loaded.model, shape.bytes_per_token)
    sizes = {
        "device": loaded.device.type,
        "machine": machine_name(loaded.device),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total_bytes(loaded.device),
        "weight_bytes": cost.weight_bytes,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
    }
    print(json.dumps(sizes))
    return 0


def machine_name(device: torch.device) -> str:
    """Of the GPU or the processor, as they are called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
