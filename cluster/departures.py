"""Departures: the answers of one Decode call, while their worker drains: who moves, and when."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from legato.cluster.attempt_errors import WorkerFaultError
from legato.cluster.cancellation import all_ended
from legato.cluster.departure import AGAIN_S, Departure
from legato.cluster.move_policies import is_worth_moving
from legato.protos import worker_pb2

if TYPE_CHECKING:
    from legato.cluster.answer_life import AnswerLife, Group
    from legato.cluster.attempt_placement import Placement
    from legato.cluster.departure import Arrival
    from legato.cluster.request_life import RequestLife
    from legato.cluster.worker_calls import DecodeCall

    MoveWord = worker_pb2.Parked | worker_pb2.Moved | worker_pb2.MoveFailed

log = logging.getLogger(__name__)


class Departures:
    """Beside the one that reads the call and hands in what concerns it. An answer that moves stays
    in `group`, and is told to the client from here, until its KV has arrived elsewhere.
    """

    def __init__(
        self, life: RequestLife, group: Group, source: DecodeCall, placement: Placement
    ) -> None:
        self._life = life
        self._group = group
        self._source = source
        self._placement = placement
        self._began_at_s = time.monotonic()
        self._began_with = {n: a.answer.num_taken for n, a in group.items()}
        self._under_way: dict[int, Departure] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._watch = asyncio.create_task(self._begin())

    def hear(self, word: MoveWord) -> Arrival | None:
        """Of an answer in the group. An arrival: the answer has left for there.

        Raises:
            WorkerFaultError: what was parked is not what there is.
        """
        departure = self._under_way.get(word.answer)
        if departure is None:
            return None
        if isinstance(word, worker_pb2.Moved):
            return departure.arrive(word)
        if isinstance(word, worker_pb2.Parked):
            departure.park(word)
        else:
            departure.fail(word)
        return None

    def hear_tokens(self, number: int) -> None:
        """More tokens of that answer came."""
        if (departure := self._under_way.get(number)) is not None:
            departure.hear_tokens()

    async def drop(self, number: int) -> None:
        """That answer has ended, or has left the call: nothing is held for it elsewhere."""
        task = self._tasks.pop(number, None)
        if task is not None and not task.done():
            task.cancel()
            await all_ended((task,))

    async def close(self) -> None:
        """Nothing is held elsewhere any more."""
        tasks = (self._watch, *self._tasks.values())
        for task in tasks:
            task.cancel()
        await all_ended(tasks)

    async def _begin(self) -> None:
        await self._source.view.departing.wait()
        for number, answer in self._group.items():
            self._tasks[number] = asyncio.create_task(self._leave(number, answer))

    async def _leave(self, number: int, answer: AnswerLife) -> None:
        """As often as it takes, unless it ends soon by itself."""
        move = 0
        try:
            while self._is_worth_it(number, answer):
                move += 1
                departure = Departure(
                    self._life, answer, self._source, self._placement, number, move
                )
                self._under_way[number] = departure
                try:
                    await departure.run()
                finally:
                    del self._under_way[number]
                await asyncio.sleep(AGAIN_S)
        except WorkerFaultError:
            log.exception("an answer of request %s moves no more", self._life.spec.request_id)

    def _is_worth_it(self, number: int, answer: AnswerLife) -> bool:
        num_taken = answer.answer.num_taken
        num_here = num_taken - self._began_with[number]
        spent_s = time.monotonic() - self._began_at_s
        return is_worth_moving(
            self._life.spec.max_tokens - num_taken,
            spent_s / num_here if num_here else None,
            self._source.view.move_s,
        )
