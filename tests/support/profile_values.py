"""The values of a small profile, as `legato profile` would write them."""

from __future__ import annotations

from typing import Any

PROFILE: dict[str, Any] = {
    "version": 1,
    "legato_version": "0.1.0",
    "machine": {"name": "a CPU", "num_cores": 2, "memory_bytes": 8 << 30},
    "worker": {
        "model": "demo",
        "device": "cpu",
        "dtype": "auto",
        "weights": "auto",
        "kv_cache": "auto",
        "num_threads": 1,
        "kv_memory_bytes": 1 << 30,
        "max_batch_size": 256,
        "context_length": 2048,
        "block_size": 16,
    },
    "weight_bytes": 270_000_000,
    "kv_bytes_per_token": 23_040,
    "prefill": [
        {"num_tokens": 100, "context_tokens": 0, "seconds": 0.1},
        {"num_tokens": 200, "context_tokens": 0, "seconds": 0.22},
        {"num_tokens": 100, "context_tokens": 100, "seconds": 0.11},
    ],
    "decode": [
        {"num_sequences": 1, "context_tokens": 100, "seconds": 0.020},
        {"num_sequences": 1, "context_tokens": 300, "seconds": 0.022},
        {"num_sequences": 5, "context_tokens": 100, "seconds": 0.040},
        {"num_sequences": 5, "context_tokens": 300, "seconds": 0.050},
    ],
    "handoff": [{"num_tokens": 100, "seconds": 0.01}],
    "link_bytes_per_s": 1e9,
    "request_overhead_s": 0.004,
    "step_jitter": [0.9, 1.0, 1.0, 1.3],
    "prefill_slowdown": 1.2,
    "decode_slowdown": 1.5,
}
