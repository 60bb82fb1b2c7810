"""Completion: one HTTP request's choices, as the router's messages make them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from legato.cluster.client_events import FINISH_REASONS
from legato.cluster.errors import invalid
from legato.cluster.http.token_logprobs import joined
from legato.cluster.http.usage import UsageCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.http.answer_form import AnswerForm
    from legato.cluster.http.field_names import FieldNames
    from legato.cluster.request import RequestSpec
    from legato.cluster.text.model_text import ModelText
    from legato.protos import generation_pb2

MAX_ECHOED = 1 << 22  # tokens of prompts in one answer's body, and their logprobs


@dataclass(frozen=True)
class Wanted:
    """What the client asked for beside the answers themselves."""

    requests: Sequence[generation_pb2.GenerateRequest]  # one a prompt, with ids
    form: AnswerForm
    names: FieldNames
    id: str
    model: str
    num_answers: int  # to each prompt
    echo: bool
    logprobs: bool
    token_ids: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass
class Choice:
    """One answer so far."""

    number: int  # among all of the request
    echo_due: bool  # the prompt comes before its first token
    num_chars: int = 0  # of the texts of all its tokens, where logprobs are wanted
    begun: bool = False  # a piece of it has been made


@dataclass
class Piece:
    """What is new of a choice."""

    choice: Choice
    is_first: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether it is more than the word that the answer has ended."""
        return bool(self.text or self.token_ids or self.logprobs)


class Completion:
    """Takes messages of all prompts in any order. Knows nothing of connections."""

    def __init__(self, wanted: Wanted, text: ModelText) -> None:
        self.wanted = wanted
        self.created = int(time.time())
        self.usage = UsageCount()
        self._num_echoed = 0
        self._text = text
        self._specs: dict[int, RequestSpec] = {}
        self._prompt_logprobs: dict[int, Sequence[Any]] = {}
        self._choices = [
            Choice(number, echo_due=wanted.echo)
            for number in range(len(wanted.requests) * wanted.num_answers)
        ]

    def begin(self, prompt: int, spec: RequestSpec) -> None:
        """What the router made of a prompt.

        Raises:
            RequestError: its echoes, with those of the prompts before, are more than one body may
                hold: each answer has its own.
        """
        wanted = self.wanted
        if wanted.echo:
            each = 1 + (spec.prompt_logprobs or 0) + 1 if wanted.logprobs else 1
            self._num_echoed += len(spec.prompt_token_ids) * wanted.num_answers * each
            if self._num_echoed > MAX_ECHOED:
                raise invalid(
                    f"n is {wanted.num_answers}, which with echo makes {self._num_echoed} tokens "
                    f"and logprobs of prompts, limit {MAX_ECHOED}"
                )
        self._specs[prompt] = spec
        self.usage.prompt_tokens += len(spec.prompt_token_ids)

    def take(self, prompt: int, response: generation_pb2.GenerateResponse) -> Piece:
        """The next of a prompt's messages."""
        if response.prompt_logprobs:
            self._prompt_logprobs[prompt] = response.prompt_logprobs
        choice = self._choices[prompt * self.wanted.num_answers + response.index]
        piece = Piece(choice, is_first=not choice.begun)
        choice.begun = True
        if choice.echo_due:
            choice.echo_due = False
            self._add_echo(prompt, piece)
        if response.HasField("delta"):
            delta = response.delta
            piece.text += delta.text
            piece.token_ids.extend(delta.token_ids)
            self.usage.completion_tokens += len(delta.token_ids)
            if self.wanted.logprobs and delta.token_ids:
                self._add_logprobs(piece, delta.token_ids, delta.logprobs)
        else:
            finish = response.finish
            self.usage.finish(response.index, finish.usage)
            piece.finish_reason = FINISH_REASONS[finish.finish_reason]
            piece.stop_reason = finish.stop_reason or None
        return piece

    def _add_echo(self, prompt: int, piece: Piece) -> None:
        request, spec = self.wanted.requests[prompt], self._specs[prompt]
        is_text = request.WhichOneof("prompt") == "text"
        piece.text = request.text if is_text else self._text.decode(spec.prompt_token_ids)
        if self.wanted.token_ids:
            piece.token_ids.extend(spec.prompt_token_ids)
        if self.wanted.logprobs:
            self._add_logprobs(piece, spec.prompt_token_ids, self._prompt_logprobs[prompt])

    def _add_logprobs(self, piece: Piece, token_ids: Sequence[int], entries: Any) -> None:  # noqa: ANN401  # a repeated field
        choice, token_text = piece.choice, self._text.token_text
        new = self.wanted.form.logprobs(token_ids, entries, token_text, choice.num_chars)
        choice.num_chars += sum(len(token_text(token_id)) for token_id in token_ids)
        piece.logprobs = joined(piece.logprobs, new)
