"""What a service's KV memory holds, in the words that `legato serve` says when it is ready."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.protos import generation_pb2


def kv_lines(model: generation_pb2.GetModelResponse) -> list[str]:
    """The capacity of the largest worker of each kind, and a warning where it is below a context's.

    Such a pool is allowed: a small machine serves short requests with it.
    """
    prefill, decode, context = (
        model.prefill_kv_tokens,
        model.decode_kv_tokens,
        model.context_length,
    )
    lines = [f"KV cache: {prefill:,} tokens a prefill worker, {decode:,} a decode worker"]
    if 0 < (least := min(prefill, decode)) < context:
        times = math.ceil(10 * context / least) / 10  # not rounded down: that would not do
        lines.append(
            f"that is less than a context of {context:,} tokens: longer requests are refused. For "
            f"all of them, give --kv-memory {times:g} times as much, or "
            f"--context-length {least}"
        )
    return lines
