"""BatchOutput: the file of finished lines; none is lost or doubled, however the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from typing import TYPE_CHECKING, Any, Self

from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path


class BatchOutput:
    """Appends; goes on where an earlier run was interrupted. One process at a time has the file.

    A line counts once its end is written: what an interrupted run left without one is taken away,
    and its request is sent again.

    Raises:
        ServiceError: another process has the file, or it holds what is no output of this batch.
    """

    def __init__(self, path: Path, custom_ids: Container[str]) -> None:
        self.path = path
        self.finished: set[str] = set()
        self.num_failed = 0  # of those, that have no answer
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ServiceError(f"cannot write {str(path)!r}: {error.strerror}") from error
        try:
            self._lock()
            self._take_up(custom_ids)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:  # noqa: ANN401  # JSON
        """A line has its answer, or the error that it always gets.

        Raises:
            ServiceError: it cannot be written; nothing of it is there then.
        """
        assert custom_id not in self.finished, "a line is finished once"
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        end = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise ServiceError(f"cannot write {str(self.path)!r}: {error.strerror}") from error
        if written < len(data):  # the disk is full
            os.ftruncate(self._fd, end)
            raise ServiceError(f"cannot write {str(self.path)!r}: no space left")
        self.finished.add(custom_id)
        self.num_failed += status != 200

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(f"another process writes {str(self.path)!r} now") from None
        except OSError as error:
            raise ServiceError(f"cannot lock {str(self.path)!r}: {error.strerror}") from error

    def _take_up(self, custom_ids: Container[str]) -> None:
        whole = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                self._take(data, f"{str(self.path)!r}, line {number}", custom_ids)
                whole += len(data)
        os.ftruncate(self._fd, whole)

    def _take(self, data: bytes, where: str, custom_ids: Container[str]) -> None:
        try:
            record = json.loads(data)
            custom_id, status = record["custom_id"], record["response"]["status_code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ServiceError(
                f"{where} is no output of a batch; choose another file with --output"
            ) from None
        if custom_id not in custom_ids or custom_id in self.finished:
            why = "comes twice" if custom_id in self.finished else "is not in this batch"
            raise ServiceError(
                f"{where}: custom_id {custom_id!r} {why}; choose another file with --output"
            )
        self.finished.add(custom_id)
        self.num_failed += status != 200
