"""Reader: makes of a client's message what is served, in threads, and of so many at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from legato.cluster.answer import Answer
from legato.cluster.caller import CALLER
from legato.cluster.tokenizing import detokenize, tokenize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.cluster.answer import TextSource
    from legato.cluster.caller import Caller
    from legato.cluster.errors import RequestError
    from legato.cluster.model_limits import ModelLimits
    from legato.cluster.request import RequestSpec
    from legato.cluster.text.model_text import ModelText
    from legato.protos import generation_pb2

    Parse = Callable[[generation_pb2.GenerateRequest, ModelText, ModelLimits], RequestSpec]
    NewAnswer = Callable[[ModelText, Sequence[str], int], TextSource]

# Tokenising a long text takes long: it must hold up neither the event loop nor a short one.
NUM_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class Reader:
    """Used on one event loop; its threads touch nothing but the message and the model's text.

    `refusal` makes the error of a message that is one too many.
    """

    def __init__(
        self,
        text: ModelText,
        *,
        parse: Parse,
        new_answer: NewAnswer,
        most_waiting: int,
        refusal: Callable[[str], RequestError],
    ) -> None:
        self._text = text
        self.parse = parse
        self._new_answer = new_answer
        self._most_waiting = most_waiting
        self._refusal = refusal
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="parse")
        self._num_reading = 0

    def close(self) -> None:
        """Forgets what has not been begun; returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, request: generation_pb2.GenerateRequest, limits: ModelLimits
    ) -> tuple[RequestSpec, list[Answer]]:
        """What is asked, validated and tokenised, and its answers so far. Raises RequestError."""
        return await self.run(self._read, request, limits, CALLER.get())

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest, limits: ModelLimits
    ) -> generation_pb2.TokenizeResponse:
        """What `read` would make of the same text or messages. Raises RequestError."""
        return await self.run(tokenize, request, self._text, limits)

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, limits: ModelLimits
    ) -> generation_pb2.DetokenizeResponse:
        """As the text of an answer. Raises RequestError."""
        return await self.run(detokenize, request, self._text, limits)

    async def run(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread.

        Raises:
            RequestError: too many are read already; and what `read` raises.
        """
        if self._num_reading > self._most_waiting:
            raise self._refusal(
                f"{self._num_reading} requests are read (limit {self._most_waiting})"
            )
        self._num_reading += 1  # until the thread is done, even if the client goes away
        reading = self._threads.submit(read, *args, **kwargs)
        loop = asyncio.get_running_loop()
        reading.add_done_callback(lambda _: loop.call_soon_threadsafe(self._have_read))
        return await asyncio.wrap_future(reading)

    def _have_read(self) -> None:
        self._num_reading -= 1

    def _read(
        self, request: generation_pb2.GenerateRequest, limits: ModelLimits, caller: Caller
    ) -> tuple[RequestSpec, list[Answer]]:
        spec = self.parse(request, self._text, limits)
        spec = replace(spec, tenant=caller.tenant, cache_salt=caller.salt(spec.cache_salt))
        min_tokens = spec.sampling.min_tokens
        answers = [
            Answer(spec, self._new_answer(self._text, spec.stop, min_tokens))
            for _ in range(spec.num_answers)
        ]
        if spec.resumed is not None:
            for index in spec.open_answers:
                received = spec.resumed.answers[index]
                answers[index].resume(received, f"resume.answers[{index}]")
        return spec, answers
