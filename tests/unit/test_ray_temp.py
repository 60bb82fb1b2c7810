from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from legato.cluster.janitor import MARK, clean_up, marked_processes, writing_processes
from legato.cluster.ray_temp import RayTemp

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    temp = RayTemp(tmp_path)
    assert os.environ[MARK] == str(temp.path)
    (temp.path / "session").mkdir()
    with (temp.path / "session" / "log").open("w"):  # as Ray's library holds one in the owner
        temp.remove()
    assert list(tmp_path.iterdir()) == []
    assert MARK not in os.environ
    assert temp._janitor.returncode == 0


def test_the_janitor_ends_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "ab"
    folder.mkdir()
    marked = subprocess.Popen(SLEEP, env={MARK: str(folder)})
    spared = subprocess.Popen(SLEEP, env={MARK: str(other)})
    try:
        mark = f"{MARK}={folder}".encode()
        deadline_s = time.monotonic() + 10
        while marked_processes(mark) != [marked.pid]:  # until it has become what it will be
            assert time.monotonic() < deadline_s
        clean_up(folder)
        assert marked.wait(5) == -signal.SIGKILL
        assert spared.poll() is None
        assert not folder.exists()
    finally:
        for process in (marked, spared):
            process.kill()
            process.wait()


def test_a_killed_owner_is_cleaned_up_after(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from legato.cluster.ray_temp import RayTemp; "
        "RayTemp(Path(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    assert len(list(tmp_path.iterdir())) == 1
    owner.kill()
    owner.communicate(timeout=5)
    deadline_s = time.monotonic() + 10
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_janitor_ends_who_writes_into_the_folder_though_the_mark_is_gone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    log, outside = folder / "log", tmp_path / "ab"
    log.touch()
    with log.open("w") as to_log, log.open() as from_log, outside.open("w") as elsewhere:
        writer = subprocess.Popen(SLEEP, stdout=to_log)
        spared = [
            subprocess.Popen(SLEEP, stdin=from_log),  # somebody reads the log
            subprocess.Popen(SLEEP, stdout=elsewhere),
        ]
    try:
        assert writing_processes(folder) == [writer.pid]
        clean_up(folder)
        assert writer.wait(5) == -signal.SIGKILL
        assert [process.poll() for process in spared] == [None, None]
        assert not folder.exists()
    finally:
        for process in (writer, *spared):
            process.kill()
            process.wait()
