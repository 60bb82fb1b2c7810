"""smallest_by_trial: the fewest workers that keep the targets, where a trial is dear."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Pools = tuple[int, int]  # prefill, decode


# A trial that misses by less says nothing of fewer workers: by chance these may keep the targets.
CLEARLY = 1.05


class Trials:
    """Tells what is known already, by monotony: more workers hardly ever make it worse."""

    def __init__(self, strain: Callable[[int, int], float]) -> None:
        """`strain`: the worst figure over its target, up to 1 where all are kept."""
        self._strain = strain
        self._strains: dict[Pools, float] = {}
        self._good: list[Pools] = []
        self._bad: list[Pools] = []
        self.count = 0

    def __call__(self, prefill: int, decode: int) -> bool:
        """Whether so many keep the targets; tried where it does not follow from others."""
        if any(p <= prefill and d <= decode for p, d in self._good):
            return True
        if any(p >= prefill and d >= decode for p, d in self._bad):
            return False
        strain = self._strains.get((prefill, decode))
        if strain is None:
            self.count += 1
            strain = self._strains[prefill, decode] = self._strain(prefill, decode)
            if strain <= 1:
                self._good.append((prefill, decode))
            elif strain > CLEARLY:
                self._bad.append((prefill, decode))
        return strain <= 1

    def may(self, prefill: int, decode: int) -> bool:
        """Whether fewer may keep the targets, by a trial of so many."""
        return self(prefill, decode) or self._strains.get((prefill, decode), CLEARLY) < CLEARLY


def smallest_by_trial(
    strain: Callable[[int, int], float], start: Pools, most: int
) -> tuple[Pools | None, int]:
    """(prefill, decode) with the least sum; of several, with the fewest decode workers; and the
    number of trials. None where no sum up to `most` does.

    Begins at `start`: where that does, sums go down for as long as one does, else up. If none of a
    sum does, none of a smaller one does.
    """
    trials = Trials(strain)
    found = _on_diagonal(trials, sum(start), start[1])
    if found is None:
        for total in range(sum(start) + 1, most + 1):
            found = _on_diagonal(trials, total, start[1])
            if found is not None:
                break
        else:
            return None, trials.count
    else:
        while sum(found) > 2:
            smaller = _on_diagonal(trials, sum(found) - 1, found[1])
            if smaller is None:
                break
            found = smaller
    return _fewest_decode(trials, found), trials.count


def _on_diagonal(trials: Trials, total: int, near: int) -> Pools | None:
    """Any with this sum that does, from about `near` decode workers outwards."""
    near = min(max(1, near), total - 1)
    if trials(total - near, near):
        return total - near, near
    # A side is given up where not even so many of the other pool would help.
    for decode in range(near - 1, 0, -1):
        if not trials.may(total - 1, decode):
            break
        if trials(total - decode, decode):
            return total - decode, decode
    for decode in range(near + 1, total):
        if not trials.may(total - decode, total - 1):
            break
        if trials(total - decode, decode):
            return total - decode, decode
    return None


def _fewest_decode(trials: Trials, found: Pools) -> Pools:
    """Of the same sum."""
    total = sum(found)
    for decode in range(found[1] - 1, 0, -1):
        if not trials.may(total - 1, decode):
            break
        if trials(total - decode, decode):
            found = total - decode, decode
    return found


def smallest_by_brute_force(strain: Callable[[int, int], float], most: int) -> Pools | None:
    """As `smallest_by_trial`, by trying every pair of each sum, the smallest sum first."""
    for total in range(2, most + 1):
        good = [d for d in range(1, total) if strain(total - d, d) <= 1]
        if good:
            return total - good[0], good[0]
    return None
