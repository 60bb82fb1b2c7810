"""Which running answers leave a decode worker that drains: a pure rule."""

from __future__ import annotations

# An answer that ends by itself this soon holds up no drain, and feels no pause.
LEAST_LEFT_S = 0.5


def is_worth_moving(num_left: int, token_s: float | None, move_s: float | None) -> bool:
    """Whether an answer moves to another worker with its KV, rather than end where it is.

    Where what may be left of it takes longer than half a second, and longer than a move.
    `num_left`: tokens that may still come; it may end before. `token_s`: between two of them, as
    measured; None: too few came. `move_s`: what the worker's last move took, from the word that
    it is to be parked until its KV was elsewhere; None: there was none.
    """
    if num_left < 1:
        return False
    return token_s is None or num_left * token_s > max(LEAST_LEFT_S, move_s or 0.0)
