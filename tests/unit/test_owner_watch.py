from __future__ import annotations

import os

import psutil
import pytest

from legato.cluster.owner_watch import SILENCE_S, OwnerProcess, OwnerWatch, is_running


def test_an_owner_in_sight_is_never_gone_however_long_it_is_silent() -> None:
    watch = OwnerWatch(0.0, seen=True)
    assert not watch.is_gone(1e6, seen=True)


def test_an_owner_that_was_seen_and_is_there_no_more_has_gone_at_once() -> None:
    watch = OwnerWatch(0.0, seen=True)
    watch.beat(1.0)
    assert watch.is_gone(1.1, seen=False)


def test_an_owner_out_of_sight_lives_while_it_beats() -> None:
    watch = OwnerWatch(0.0, seen=False)
    watch.beat(10.0)
    assert not watch.is_gone(10.0 + SILENCE_S, seen=False)
    assert watch.is_gone(10.1 + SILENCE_S, seen=False)


@pytest.mark.parametrize(("late_s", "runs"), [(0.0, True), (-100.0, False)])
def test_another_process_with_its_pid_is_not_the_owner(late_s: float, runs: bool) -> None:
    me = psutil.Process()
    assert is_running(OwnerProcess("node", os.getpid(), me.create_time() + late_s)) is runs
