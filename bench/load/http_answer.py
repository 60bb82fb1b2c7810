"""HttpAnswer: what the chunks of one streamed answer say, whoever serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legato.bench.load.sample import INCOMPLETE

if TYPE_CHECKING:
    from legato.bench.load.sample import Sample

# How it is known how many tokens a chunk has.
BY_IDS, BY_USAGE, BY_TOTAL, BY_CHUNKS = (
    *("token ids", "usage in each chunk"),
    *("usage at the end, spread over the chunks", "chunks, each taken for a token"),
)
# What servers say of a request's times in its last chunks, in ms, and what Timings calls it.
_TIMES_MS = (
    ("timings", "prompt_ms", "prefill_model_s"),  # llama.cpp
    ("timings", "predicted_ms", "decode_model_s"),
    ("metrics", "queue_time_ms", "queue_s"),  # vLLM, where they are enabled
    ("metrics", "time_to_first_token_ms", "prefill_s"),
    ("metrics", "generation_time_ms", "decode_s"),
)
_TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat's delta


class ServerError(Exception):
    """The stream ended with an error in the place of an answer."""


class HttpAnswer:
    """Notes tokens in the sample as chunks come."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._guessed = False  # some chunk did not say how many tokens it has
        self._num_tokens = 0
        self._total: int | None = None  # as the server counts
        self._ended = False

    def take(self, chunk: object, now_s: float) -> None:
        """One event's JSON.

        Raises:
            ServerError: it is an error, or no chunk.
        """
        if not isinstance(chunk, dict):
            raise ServerError(f"an event is no JSON object: {str(chunk)[:80]!r}")
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ServerError(str(message))
        total = self._take_usage(chunk.get("usage"))
        for part, name, ours in _TIMES_MS:
            told = chunk.get(part)
            if isinstance(told, dict) and isinstance(value := told.get(name), int | float):
                self._sample.server_times_s[ours] = value / 1000
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        if (count := self._count(choice, total)) > 0:
            self._sample.note(now_s, count)
            self._num_tokens += count
        if choice.get("finish_reason"):
            self._ended = True

    def done(self) -> None:
        """The event that ends a stream came."""
        self._ended = True

    def end(self, now_s: float) -> None:
        """The stream ended, as HTTP has it."""
        sample = self._sample
        if not self._ended:
            sample.fail(now_s, INCOMPLETE, "the stream ended without finish_reason or [DONE]")
            return
        total = self._total
        if self._guessed:
            sample.counted_by = BY_CHUNKS if total is None else BY_TOTAL
            if total is not None and total > 0 and total != self._num_tokens:
                sample.recount(total)
        sample.end(now_s, total)

    def _take_usage(self, usage: object) -> int | None:
        """Tokens of the answer so far, where this chunk says so."""
        if not isinstance(usage, dict):
            return None
        sample = self._sample
        if isinstance(prompt := usage.get("prompt_tokens"), int):
            sample.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            sample.cached_tokens = cached
        total = usage.get("completion_tokens")
        if not isinstance(total, int):
            return None
        self._total = total
        return total

    def _count(self, choice: dict[str, Any], total: int | None) -> int:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._sample.counted_by = BY_IDS
            return len(ids)
        # The usage of the last chunk alone does not tell those before it apart.
        if total is not None and not self._guessed:
            self._sample.counted_by = self._sample.counted_by or BY_USAGE
            return total - self._num_tokens
        delta = choice.get("delta")
        text = choice.get("text")
        if isinstance(delta, dict):
            text = next((delta[name] for name in _TEXTS if delta.get(name)), None)
        if not text:
            return 0
        self._guessed = True
        return 1
