"""Priority: who yields to whom where there is not room for all."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """The greater one goes first."""

    BATCH = 0  # fills what the others leave, and yields first
    INTERACTIVE = 1
