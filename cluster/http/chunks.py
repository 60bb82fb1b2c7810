"""Chunks: the events of a stream (SSE) that the pieces of a request's choices make."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from legato.cluster.http.answer_form import quoted
from legato.cluster.http.error_response import error_object

if TYPE_CHECKING:
    from legato.cluster.errors import RequestError
    from legato.cluster.http.completion import Completion, Piece

DONE = b"data: [DONE]\n\n"


class Chunks:
    """Written by hand around what changes: a chunk is made for every token of every stream."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        wanted = completion.wanted
        self._form = wanted.form
        self._head = (
            f'data: {{"id":{quoted(wanted.id)},"object":"{wanted.form.chunk_object}",'
            f'"created":{completion.created},"model":{quoted(wanted.model)},"choices":['
        )

    def of(self, piece: Piece) -> bytes:
        """One event; two where an answer's last text comes with its finish."""
        finish = piece.finish_reason
        if finish is None:
            return self._content(piece).encode()
        end = self._choice(
            piece,
            self._form.last_piece(),
            "null",
            f'{quoted(finish)},"stop_reason":{json.dumps(piece.stop_reason, ensure_ascii=False)}',
        )
        return ((self._content(piece) if piece.has_content else "") + end).encode()

    def usage(self) -> bytes:
        """The last one, where the client wants it."""
        usage = json.dumps(self._completion.usage.so_far())
        return f'{self._head}],"usage":{usage}}}\n\n'.encode()

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that has begun."""
        return f"data: {json.dumps(error_object(error), ensure_ascii=False)}\n\n".encode()

    def _content(self, piece: Piece) -> str:
        logprobs = "null"
        if piece.logprobs is not None:
            logprobs = json.dumps(piece.logprobs, ensure_ascii=False)
        text = self._form.piece(piece.text, is_first=piece.is_first)
        if self._completion.wanted.token_ids:
            text += f',"token_ids":{piece.token_ids}'
        return self._choice(piece, text, logprobs, "null")

    def _choice(self, piece: Piece, text: str, logprobs: str, finish: str) -> str:
        usage, wanted = "", self._completion.wanted
        if wanted.continuous_usage:
            usage = f',"usage":{json.dumps(self._completion.usage.so_far())}'
        elif wanted.include_usage:
            usage = ',"usage":null'
        return (
            f'{self._head}{{"index":{piece.choice.number},{text},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]{usage}}}\n\n'
        )
