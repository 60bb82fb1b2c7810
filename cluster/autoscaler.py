"""Autoscaler: when a need is believed, and what is decided then. The clock is handed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.cluster.scaling_decision import Flip, Resize
from legato.cluster.scaling_rules import Need, decide_decode, decide_prefill, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legato.cluster.autoscale_options import AutoscaleOptions, PoolRange
    from legato.cluster.control_plane import Role
    from legato.cluster.pool_pressure import DecodePressure, PoolSize, PrefillPressure
    from legato.cluster.scaling_decision import Decision

MAX_PAUSE_S = 5.0  # between two looks that are taken as one watch


@dataclass
class _Track:
    """What is remembered of one pool: a minute of needs. It is built anew within that time."""

    allowed: PoolRange
    watched_since_s: float
    quiet_until_s: float  # no decision before
    settled_since_s: float | None = None  # None: workers are on their way, or missing
    needs: deque[tuple[float, Need]] = field(default_factory=deque)

    def note(self, size: PoolSize, need: Need, now_s: float, options: AutoscaleOptions) -> None:
        """What is so at this moment."""
        if self.needs and now_s - self.needs[-1][0] > MAX_PAUSE_S:
            self.needs.clear()
            self.watched_since_s, self.settled_since_s = now_s, None
        if not size.settled:
            self.settled_since_s = None
        elif self.settled_since_s is None:
            self.settled_since_s = now_s
            self.quiet_until_s = max(self.quiet_until_s, now_s + options.cool_down_s)
        self.needs.append((now_s, Need(self.allowed.clamp(need.workers), need.reason)))
        while self.needs[0][0] < now_s - max(options.up_after_s, options.down_after_s):
            self.needs.popleft()

    def sizes(self, since_s: float) -> Iterable[int]:
        """That were needed from then on; never empty."""
        return [need.workers for at_s, need in self.needs if at_s >= since_s]


class Autoscaler:
    """Holds, cool-down, ranges and flips around the rules of `scaling_rules`.

    - *Up*: when for `up_after_s` on end more was needed than there is; to the least that was needed
      in that time. Judged only while every worker of the target serves: those that start are
      waited for, and a pool whose starts fail is not made to start more.
    - *Down*: when for `down_after_s` on end fewer would have done; one worker at a time, never
      below the most that was needed in that time. A pool that never got to its target gives up
      what it has not got.
    - *Cool-down*: after a change, and once more from when its workers serve, nothing is decided for
      that pool for `cool_down_s`.
    - *Flip*: where one pool is to grow and the other could have spared a worker by its own rule for
      `up_after_s`, a worker of that one changes its role instead (`can_flip`).

    Called about once a second; after a longer pause, in which nobody knew the load, it begins anew.
    Whoever drives it carries the decisions out; in a dry run nobody does, and the same decision
    comes again after the cool-down, for as long as it is called for.
    """

    def __init__(self, options: AutoscaleOptions, now_s: float, *, can_flip: bool = False) -> None:
        self._options = options
        self._can_flip = can_flip
        self._tracks: dict[Role, _Track] = {
            "prefill": _Track(options.prefill, now_s, now_s),
            "decode": _Track(options.decode, now_s, now_s),
        }

    def step(
        self, prefill: PrefillPressure, decode: DecodePressure, now_s: float
    ) -> list[Decision]:
        """At most one decision a pool."""
        options = self._options
        sizes: dict[Role, PoolSize] = {"prefill": prefill.size, "decode": decode.size}
        idlest: dict[Role, str] = {"prefill": prefill.idlest, "decode": decode.idlest}
        needs: dict[Role, Need] = {
            "prefill": decide_prefill(prefill, options.ttft_slo_s),
            "decode": decide_decode(decode, options.itl_slo_s),
        }
        for role, track in self._tracks.items():
            track.note(sizes[role], needs[role], now_s, options)
        decisions: list[Decision] = []
        for role, track in self._tracks.items():
            if now_s < track.quiet_until_s:
                continue
            other: Role = "decode" if role == "prefill" else "prefill"
            up = _up(role, track, sizes[role], now_s, options)
            decision: Decision | None = up or _down(role, track, sizes[role], now_s, options)
            if up is not None and self._can_spare(other, sizes[other], now_s):
                reason = f"{up.reason}; {other} can spare one: {needs[other].reason}"
                decision = Flip(idlest[other], role, up.before + 1, reason)
                self.note_change(other, now_s)
            if decision is not None:
                decisions.append(decision)
                self.note_change(role, now_s)
        return decisions

    def needs(self) -> dict[Role, Need]:
        """As last judged, within the ranges; empty before the first step."""
        return {role: track.needs[-1][1] for role, track in self._tracks.items() if track.needs}

    def note_order(self, role: Role, now_s: float) -> None:
        """An operator set the pool's target: it stands for a cool-down, and what was needed before
        does not speak against it.
        """
        self.note_change(role, now_s)
        track = self._tracks[role]
        track.watched_since_s = now_s
        track.needs.clear()

    def note_change(self, role: Role, now_s: float) -> None:
        """The pool's target changes: its cool-down begins."""
        track = self._tracks[role]
        track.quiet_until_s = now_s + self._options.cool_down_s
        track.settled_since_s = None

    def _can_spare(self, role: Role, size: PoolSize, now_s: float) -> bool:
        track = self._tracks[role]
        return (
            self._can_flip
            and size.settled
            and now_s >= track.quiet_until_s
            # Needs are within the range: with fewer than there are, it is not at its least.
            and max(track.sizes(now_s - self._options.up_after_s)) < size.ready
        )


def _up(
    role: Role, track: _Track, size: PoolSize, now_s: float, options: AutoscaleOptions
) -> Resize | None:
    since_s = now_s - options.up_after_s
    if track.settled_since_s is None or track.settled_since_s > since_s:
        return None
    after = min(track.sizes(since_s))
    if after <= size.target:
        return None
    return Resize(role, size.target, after, track.needs[-1][1].reason)


def _down(
    role: Role, track: _Track, size: PoolSize, now_s: float, options: AutoscaleOptions
) -> Resize | None:
    since_s = now_s - options.down_after_s
    if track.watched_since_s > since_s:
        return None
    most = max(track.sizes(since_s))
    after = max(most, min(size.ready, size.target - 1))
    if most >= size.target or after >= size.target:
        return None
    reason = track.needs[-1][1].reason
    if not size.settled:
        reason = f"{size_text(size)}, and no more are needed: {reason}"
    return Resize(role, size.target, after, f"{reason}; so for {options.down_after_s:g} s")
