"""Whether a request may itself be what its worker was lost of: pure rules.

Workers die of many things, and what they served then is moved. But one request may be what kills
each worker that it meets; so each has a bound on the losses that it may have brought about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legato.cluster.timings import Phase

if TYPE_CHECKING:
    from legato.cluster.control_plane import Role

# An answer that has decoded for so long, or so many tokens of one attempt, was well there: the next
# attempt begins where this one ended, and what is wrong with the answer would soon show again.
WELL_AFTER_S = 1.0
WELL_AFTER_TOKENS = 16
# For each loss that may be a request's doing, so many more that cannot are borne. No request is
# moved without end.
INNOCENT_PER_STRIKE = 16


def was_well(phase: Phase, in_phase_s: float, num_new_tokens: int) -> bool:
    """Whether the attempt that is ending had decoded for a while."""
    long = in_phase_s >= WELL_AFTER_S or num_new_tokens >= WELL_AFTER_TOKENS
    return phase is Phase.DECODE and long


def may_be_cause(role: Role, phase: Phase, *, kv_under_way: bool) -> bool:
    """Whether the worker of that role that was lost was computing the answer, or about to.

    A prefill worker that only sends its KV is not; nor is a decode worker that has only promised
    room, or that the KV is still on its way to.
    """
    if role == "prefill":
        return phase is Phase.PREFILL
    return phase is not Phase.TICKET and not kv_under_way


def gives_up(strikes: int, failures: int, max_attempts: int) -> bool:
    """`failures`: all, those that may be the request's doing included."""
    return strikes >= max_attempts or failures >= INNOCENT_PER_STRIKE * max_attempts
