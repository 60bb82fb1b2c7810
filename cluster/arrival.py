"""An answer goes on at the worker that its KV has moved to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.decode_stream import DecodeStream
from legato.cluster.worker_calls import AttemptEndedError

if TYPE_CHECKING:
    from legato.cluster.answer_life import Group
    from legato.cluster.departure import Arrival
    from legato.cluster.request_life import RequestLife


async def stay(life: RequestLife, group: Group, arrival: Arrival) -> None:
    """From the move to the answer's end; it is left in `group` where the worker is lost. Nothing is
    held there when this ends.
    """
    [answer] = group.values()
    call = arrival.call
    answer.note_begun(arrival.attempt, None, call.view.worker_id)
    try:
        answer.begin_moved()
        await call.start({0: answer.answer.token_ids[answer.num_replayed - 1]})
        await arrival.joined
        stream = DecodeStream(
            life,
            group,
            call,
            arrival.placement,
            attempt=arrival.attempt,
            on_end=arrival.close,
        )
        await stream.pass_on()
        call.view.failed_requests.clear()
    except AttemptEndedError as error:
        life.note_end(error, arrival.placement.demand, tuple(group.values()))
    finally:
        arrival.close()
        for left in group.values():
            left.note_left(arrival.attempt)
