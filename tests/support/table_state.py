"""State: where a request of the cancel table is struck, and what holds it there."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from fake_engine import FakeModel, fake_config

from legato.worker.handoff.frames import RowsFrame, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from worker_pair import Worker

    from legato.worker.forward import ForwardBatch
    from legato.worker.kv.cache import KvCache

CONFIG = fake_config(num_layers=4)
MODEL = FakeModel(CONFIG)
CHUNK_BYTES = 1024  # of the sender, so that a prompt's rows are many frames
PROMPT = [(i * 37 + 5) % 320 for i in range(50)]
OTHER_PROMPT = [(i * 41 + 9) % 320 for i in range(50)]
NUM_TOKENS = 16
HANDOFF_BYTES = len(PROMPT) * CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
PREFILL_CHUNK_TOKENS = 16
HELD_DECODE_STEP = 5
HELD_PREFILL_STEP = 2  # of four


class State(Enum):
    """Where the request is when it is struck."""

    QUEUED = "queued"
    TICKETED = "ticketed"
    PREFILLING = "prefilling"
    BEFORE_ROWS = "handing off, no rows yet"
    AMID_ROWS = "handing off, in the middle"
    BEFORE_COMMIT = "handing off, not committed"
    DECODING = "decoding"
    LOCAL_PREFILL = "local prefill"
    FINISHED = "finished"

    @property
    def hands_off(self) -> bool:
        return self in (State.BEFORE_ROWS, State.AMID_ROWS, State.BEFORE_COMMIT)


class StepHold:
    """Stops a worker's engine inside one of its steps, counted from now."""

    def __init__(self, worker: Worker) -> None:
        self._model = worker.model
        self._forward = self._model.forward
        self._steps_left = 0
        self._model.forward = self._step
        self.is_inside = False

    def arm(self, step: int) -> None:
        """The step of that number, from 1."""
        self._steps_left = step

    def release(self) -> None:
        self._steps_left = 0
        self.is_inside = False
        self._model.go.set()

    def _step(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        if self._steps_left:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._model.go.clear()
                self.is_inside = True
        result: Tensor = self._forward(batch, cache)
        return result


def gate_of(state: State, rows_passed: int) -> Callable[[bytes], bool] | None:
    """Which frame of a link is the first that does not pass."""
    num_rows = 0

    def later_rows(message: bytes) -> bool:
        nonlocal num_rows
        num_rows += kind_of(message) == "rows"
        return num_rows > rows_passed

    match state:
        case State.BEFORE_ROWS:
            return lambda message: kind_of(message) == "rows"
        case State.AMID_ROWS:
            return later_rows
        case State.BEFORE_COMMIT:
            return lambda message: kind_of(message) == "close"
    return None


def kind_of(message: bytes) -> str | None:
    """Rows have a slot or bytes, by the lane."""
    frame = read_frame(message)
    return "rows" if isinstance(frame, RowsFrame) else frame.WhichOneof("frame")
