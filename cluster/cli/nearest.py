"""did_you_mean: the word that was probably meant, for a message about one that is wrong."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_CUTOFF = 0.55
# What other systems call the same; of each the first that is allowed.
_MEANT = {
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "f16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "f32": ("float32",),
    "float": ("float32",),
    "f8": ("fp8",),
    "e4m3": ("fp8",),
    "fp8_e4m3": ("fp8",),
    "q8": ("int8",),
    "q8_0": ("int8", "keep"),
    "8bit": ("int8",),
    "q4": ("int4",),
    "4bit": ("int4",),
    "gpu": ("cuda",),
    "shm": ("auto",),
    "tcp": ("grpc",),
    "max_model_len": ("context_length",),
    "max_num_seqs": ("max_batch_size",),
    "max_num_batched_tokens": ("prefill_chunk_tokens",),
    "gpu_memory_utilization": ("kv_memory",),
    "quantization": ("weights",),
    "kv_cache_dtype": ("kv_cache",),
    "enable_prefix_caching": ("prefix_cache",),
    "num_threads": ("threads",),
    "address": ("host",),
}


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`: did you mean bfloat16?`, or nothing where no allowed word is near."""
    words = list(allowed)
    plain = word.strip().lower().replace("-", "_")
    meant = [name for name in _MEANT.get(plain, ()) if name in words]
    by_plain = {name.lower().replace("-", "_"): name for name in words}
    near = [by_plain[name] for name in get_close_matches(plain, by_plain, 1, _CUTOFF)]
    found = (meant or near)[:1]
    return f": did you mean {found[0]}?" if found else ""
