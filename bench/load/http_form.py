"""HttpForm: what a request looks like, of the forms that servers of OpenAI's API take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
# Beyond OpenAI's fields. A server that does not know one refuses it, or ignores it.
_ALL = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_USAGE = {"stream_options": {"include_usage": True}}
_EXTRAS: tuple[dict[str, Any], ...] = (_ALL, {"ignore_eos": True, **_USAGE}, _USAGE, {})


@dataclass(frozen=True)
class HttpForm:
    """Greedy; as long as is asked, where the server can ignore EOS."""

    path: str
    takes_ids: bool
    extras: dict[str, Any] = field(default_factory=dict)

    def body(self, model: str, prompt: str | list[int], max_tokens: int) -> bytes:
        """JSON. `prompt`: ids where the form takes them."""
        assert isinstance(prompt, list) == self.takes_ids
        asked = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.path == CHAT_PATH
            else {"prompt": prompt}
        )
        return json.dumps(
            {
                "model": model,
                **asked,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                **self.extras,
            }
        ).encode()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the server would not have."""
        notes = []
        if "ignore_eos" not in self.extras:
            notes.append("the server takes no ignore_eos: answers may be shorter than asked")
        if "stream_options" not in self.extras:
            notes.append("the server takes no stream_options: it may not say how many tokens came")
        return tuple(notes)


def forms() -> Iterator[HttpForm]:
    """The best first: token ids before text, and text as it stands before a chat."""
    for path, takes_ids in ((TEXT_PATH, True), (TEXT_PATH, False), (CHAT_PATH, False)):
        for extras in _EXTRAS:
            yield HttpForm(path, takes_ids, extras)
