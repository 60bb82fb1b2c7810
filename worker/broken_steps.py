"""BrokenSteps: tells an engine that is broken from a request that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.worker.sampler import Sampled

# So many steps in a row without one usable row of logits are the engine's fault, not its
# requests'. Few, for each of them ends all its sequences; not one, for a prompt may be alone.
_LIMIT = 4


class BrokenSteps:
    """Counts steps in a row whose logits were all NaN or infinite."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, tokens: Sequence[Sampled | None]) -> None:
        """A step's tokens, None where there is none; raises FloatingPointError at the limit."""
        if not tokens:  # a prompt's chunk that is not the last says nothing
            return
        self._count = 0 if any(tokens) else self._count + 1
        if self._count >= _LIMIT:
            raise FloatingPointError(
                f"all logits of {self._count} steps in a row were NaN or infinite (limit {_LIMIT})"
            )
