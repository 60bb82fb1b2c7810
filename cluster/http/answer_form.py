"""AnswerForm: how an answer is written, whole or in pieces: as text, or as a message of a chat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from legato.cluster.http.token_logprobs import chat_logprobs, completion_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.http.token_logprobs import Entries, TokenText


def quoted(text: str) -> str:
    """As JSON."""
    return json.dumps(text, ensure_ascii=False)


class AnswerForm(Protocol):
    """Of one endpoint."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a choice that hold an answer's whole text."""
        ...

    def piece(self, text: str, *, is_first: bool) -> str:
        """The same of the next piece, as JSON without braces."""
        ...

    def last_piece(self) -> str:
        """Of the chunk that has the finish reason, and nothing else."""
        ...

    def logprobs(
        self, token_ids: Sequence[int], entries: Entries, text: TokenText, offset: int
    ) -> dict[str, Any]:
        """See `token_logprobs`."""
        ...


class TextForm:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """See AnswerForm."""
        return {"text": text}

    def piece(self, text: str, *, is_first: bool) -> str:
        """See AnswerForm."""
        return f'"text":{quoted(text)}'

    def last_piece(self) -> str:
        """See AnswerForm."""
        return '"text":""'

    def logprobs(
        self, token_ids: Sequence[int], entries: Entries, text: TokenText, offset: int
    ) -> dict[str, Any]:
        """See AnswerForm."""
        return completion_logprobs(token_ids, entries, text, offset)


class ChatForm:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        """See AnswerForm."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, *, is_first: bool) -> str:
        """See AnswerForm. The role comes with the first token, as clients time it."""
        role = '"role":"assistant",' if is_first else ""
        return f'"delta":{{{role}"content":{quoted(text)}}}'

    def last_piece(self) -> str:
        """See AnswerForm."""
        return '"delta":{}'

    def logprobs(
        self, token_ids: Sequence[int], entries: Entries, text: TokenText, offset: int
    ) -> dict[str, Any]:
        """See AnswerForm."""
        return chat_logprobs(token_ids, entries, text)
