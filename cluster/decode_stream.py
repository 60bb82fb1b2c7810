"""DecodeStream: the answers of one Decode call from the batch to the client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from legato.cluster.answer_life import DecodeFigures, enter
from legato.cluster.attempt_errors import WorkerFailedError, WorkerFaultError
from legato.cluster.departures import Departures
from legato.cluster.load_window import TokenGaps
from legato.cluster.timings import Phase
from legato.protos import common_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from legato.cluster.answer_life import AnswerLife, Group
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.departures import MoveWord
    from legato.cluster.request_life import RequestLife
    from legato.cluster.worker_calls import DecodeCall


class DecodeStream:
    """From Joined on. An answer that ends, or goes on elsewhere, is taken out of `group`."""

    def __init__(
        self,
        life: RequestLife,
        group: Group,
        decode: DecodeCall,
        placement: Placement,
        *,
        attempt: int,
        on_end: Callable[[], None],
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`on_end`: gives back what is held on the workers, before the client is told that the last
        one has ended; `before_end`: what is still to be waited for where one ends.
        """
        self._life = life
        self._group = group
        self._decode = decode
        self._placement = placement
        self._attempt = attempt
        self._on_end = on_end
        self._before_end = before_end
        self._stopped: set[int] = set()

    async def pass_on(self) -> None:
        """One message to the client for each from the worker; the next is read when gRPC took it,
        so a slow client holds back its own stream and fills no buffer here.

        Raises:
            AttemptEndedError: the worker is lost to those that are left.
        """
        enter(self._group.values(), Phase.DECODE)
        worker_id = self._decode.view.worker_id
        figures = {n: DecodeFigures(a, worker_id) for n, a in self._group.items()}
        departures = Departures(self._life, self._group, self._decode, self._placement)
        window = next(iter(self._group.values())).window
        gaps = TokenGaps(window, time.monotonic()) if window is not None else None
        try:
            while self._group:
                asked_at_s = time.monotonic()
                event = await self._decode.next_of_answer()
                waited_s = time.monotonic() - asked_at_s
                number = event.answer
                if number in self._stopped:  # it was on its way when Stop was sent
                    continue
                if number not in self._group:
                    raise WorkerFaultError(
                        f"worker {worker_id} goes on with answer {number}: it is not there"
                    )
                if isinstance(event, worker_pb2.Tokens):
                    departures.hear_tokens(number)
                    figures[number].count(event)
                    num_tokens, num_open = len(event.tokens), len(self._group)
                    self._life.admission.times.note_output(num_tokens, waited_s * num_open)
                    if gaps is not None:
                        gaps.arrived(number, len(event.tokens), time.monotonic())
                    await self._take(event, departures)
                    if gaps is not None:
                        gaps.delivered(time.monotonic())
                elif isinstance(event, worker_pb2.Preempted):
                    answer = self._leave(number)
                    await departures.drop(number)
                    answer.record.preempted()
                    before = answer.num_preemptions
                    answer.num_preemptions = max(before + 1, event.num_preemptions)
                    self._life.go_on_alone(answer)
                else:
                    await self._take_word(event, departures)
        finally:
            await departures.close()

    async def _take(self, tokens: worker_pb2.Tokens, departures: Departures) -> None:
        life, group, number = self._life, self._group, tokens.answer
        answer = group[number]
        cut_short = tokens.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        finished = tokens.finished and not cut_short
        delta, ending = answer.take(tokens.tokens, tokens.finish_reason if finished else None)
        if ending is not None:
            answer.enter(Phase.DELIVERY)
            self._leave(number)
            if not finished:
                self._stopped.add(number)
                await self._decode.stop(number)
                if not group:
                    await self._decode.end()
            await departures.drop(number)
            if self._before_end is not None:
                await self._before_end()
            if not group:
                self._on_end()
        await life.deliver(answer, delta, ending)
        if ending is None and cut_short:
            raise WorkerFailedError(self._decode.view, "it ended the sequence early")

    async def _take_word(self, word: MoveWord, departures: Departures) -> None:
        arrival = departures.hear(word)
        if not isinstance(word, worker_pb2.Moved):
            return
        answer = self._leave(word.answer)
        if arrival is not None:
            self._life.go_on_there(answer, arrival)
        else:  # its Resume came too late: the KV is gone from here, and nobody has it elsewhere
            self._life.go_on_alone(answer)
        await departures.drop(word.answer)

    def _leave(self, number: int) -> AnswerLife:
        """Of this call the answer wants nothing more."""
        answer = self._group.pop(number)
        answer.note_left(self._attempt)
        return answer
