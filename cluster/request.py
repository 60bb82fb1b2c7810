"""RequestSpec: one validated request, and the rules by which a GenerateRequest becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.cluster.text.model_text import ModelText
    from legato.protos import common_pb2, generation_pb2


@dataclass(frozen=True)
class ModelLimits:
    """What the ready workers can hold; the capacities are those of the largest worker."""

    context_length: int
    vocab_size: int
    prefill_kv_tokens: int
    decode_kv_tokens: int


@dataclass(frozen=True)
class RequestSpec:
    """Tokenised and within every limit; nothing downstream has to check again."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: common_pb2.SamplingParams  # complete: every default filled, max_tokens clamped
    stop: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    batch_priority: bool

    @property
    def max_tokens(self) -> int:
        """Most tokens of the answer."""
        return self.sampling.max_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Rows of KV at the end: the last token's is never written."""
        return len(self.prompt_token_ids) + self.max_tokens - 1


def parse_request(
    request: generation_pb2.GenerateRequest, text: ModelText, limits: ModelLimits
) -> RequestSpec:
    """Validates and tokenises. May take long for a long text: run it off the event loop.

    Raises:
        RequestError: the status and a sentence naming field, value and limit.
    """
    raise NotImplementedError
