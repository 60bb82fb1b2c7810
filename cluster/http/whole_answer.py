"""WholeAnswer: collects a request's choices into one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.cluster.http.completion import Completion, Piece


@dataclass
class _Collected:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


class WholeAnswer:
    """All pieces in, one object out."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._choices: dict[int, _Collected] = {}

    def add(self, piece: Piece) -> None:
        """The next of any choice."""
        collected = self._choices.setdefault(piece.choice.number, _Collected())
        collected.texts.append(piece.text)
        collected.token_ids += piece.token_ids
        if piece.logprobs is not None:
            collected.logprobs.append(piece.logprobs)
        if piece.finish_reason is not None:
            collected.finish_reason = piece.finish_reason
            collected.stop_reason = piece.stop_reason

    def object(self) -> dict[str, Any]:
        """The body of the response."""
        completion = self._completion
        wanted = completion.wanted
        return {
            "id": wanted.id,
            "object": wanted.form.whole_object,
            "created": completion.created,
            "model": wanted.model,
            "choices": [self._choice(number) for number in sorted(self._choices)],
            "usage": completion.usage.so_far(),
        }

    def _choice(self, number: int) -> dict[str, Any]:
        collected, wanted = self._choices[number], self._completion.wanted
        logprobs: dict[str, Any] | None = None
        if collected.logprobs:
            names = collected.logprobs[0]
            logprobs = {
                name: [item for part in collected.logprobs for item in part[name]] for name in names
            }
        choice = {
            "index": number,
            **wanted.form.whole("".join(collected.texts)),
            "logprobs": logprobs,
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
        }
        if wanted.token_ids:
            choice["token_ids"] = collected.token_ids
        return choice
