"""UsageCount: tokens of all prompts and answers of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.protos import generation_pb2


@dataclass
class UsageCount:
    """Each prompt counts once, however many answers it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def finish(self, index: int, usage: generation_pb2.Usage) -> None:
        """An answer ended; its tokens are counted already. `index`: which one of its prompt's."""
        if index == 0:
            self.cached_tokens += usage.cached_prompt_tokens

    def so_far(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
