from __future__ import annotations

from itertools import chain, repeat

from legato.cluster.actors.orphan_watch import NUM_LOOKS, end_with_controller


async def test_only_a_controller_that_stays_away_ends_a_worker() -> None:
    seen = chain([True, False, False, True], repeat(False))
    looks: list[bool] = []
    ends: list[int] = []

    def look() -> bool:
        looks.append(next(seen))
        return looks[-1]

    await end_with_controller(look, ends.append, period_s=0.001)
    assert ends == [0]
    assert looks == [True, False, False, True, *([False] * NUM_LOOKS)]
