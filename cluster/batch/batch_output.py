"""BatchOutput: the file of finished lines; none is lost or doubled, however the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OK_STATUS = 200


@dataclass(frozen=True)
class _Record:
    """What a line of the file says."""

    custom_id: str
    status: int
    request_hash: str | None  # None where another program wrote it


class BatchOutput:
    """Appends; goes on where an earlier run was interrupted. One process at a time has the file.

    A line counts once its end is written: what an interrupted run left without one is taken away,
    and its request is sent again. So is an error's line where the request was changed since, or
    where `retries_errors`.

    Raises:
        WrongInputError: it holds what is no output of this batch, or answers to other requests.
        ServiceError: another process has the file, or it cannot be written.
    """

    def __init__(
        self, path: Path, request_hashes: Mapping[str, str], *, retries_errors: bool = False
    ) -> None:
        """`request_hashes`: of all lines of the batch, by custom_id; see `hash_request`."""
        self.path = path
        self.finished: set[str] = set()
        self.num_failed = 0  # of those, that have no answer
        self.num_retried = 0  # had an error that was taken away
        self._hashes = request_hashes
        self._retries_errors = retries_errors
        self._fd = self._open()
        try:
            self._take_up()
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
            "request_hash": self._hashes[custom_id],
        }
        data = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        end = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise self._unwritten(error) from error
        if written < len(data):  # the disk is full
            os.ftruncate(self._fd, end)
            raise ServiceError(f"cannot write {str(self.path)!r}: no space left")
        self.finished.add(custom_id)
        self.num_failed += status != OK_STATUS

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            self._lock(fd)
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                raise ServiceError(f"another process has just written {str(self.path)!r} anew")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(f"another process writes {str(self.path)!r} now") from None
        except OSError as error:
            raise ServiceError(f"cannot lock {str(self.path)!r}: {error.strerror}") from error

    def _take_up(self) -> None:
        whole = 0
        taken_away: set[int] = set()  # numbers of lines
        seen: set[str] = set()
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                whole += len(data)
                where = f"{str(self.path)!r}, line {number}"
                record = self._check(data, where, seen)
                seen.add(record.custom_id)
                if self._is_asked_again(record, where):
                    taken_away.add(number)
                    continue
                self.finished.add(record.custom_id)
                self.num_failed += record.status != OK_STATUS
        os.ftruncate(self._fd, whole)
        if taken_away:
            self._rewrite_without(taken_away)
        self.num_retried = len(taken_away)

    def _check(self, data: bytes, where: str, seen: set[str]) -> _Record:
        try:
            value = json.loads(data)
            record = _Record(
                value["custom_id"], value["response"]["status_code"], value.get("request_hash")
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WrongInputError(
                f"{where} is no output of a batch; choose another file with --output"
            ) from None
        name = record.custom_id
        if name not in self._hashes or name in seen:
            why = "comes twice" if name in seen else "is not in this batch"
            raise WrongInputError(
                f"{where}: custom_id {name!r} {why}; choose another file with --output"
            )
        return record

    def _is_asked_again(self, record: _Record, where: str) -> bool:
        """Nobody misses an error that is taken away; an answer may be wanted still."""
        is_other = record.request_hash not in (None, self._hashes[record.custom_id])
        if record.status != OK_STATUS:
            return is_other or self._retries_errors
        if is_other:
            raise WrongInputError(
                f"{where}: custom_id {record.custom_id!r} has the answer to another request than "
                "the batch has now; choose another file with --output, or take this line out to "
                "have it asked again"
            )
        return False

    def _rewrite_without(self, numbers: set[int]) -> None:
        """A new file in the place of the old one, in one step: a kill leaves one of the two."""
        path = self.path.resolve()
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            self._lock(fd)
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            with os.fdopen(os.dup(self._fd), "rb") as old, os.fdopen(os.dup(fd), "wb") as new:
                old.seek(0)
                new.writelines(
                    data for number, data in enumerate(old, start=1) if number not in numbers
                )
            os.fsync(fd)
            part.replace(path)
        except BaseException as error:
            os.close(fd)
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._unwritten(error) from error
            raise
        os.close(self._fd)
        self._fd = fd

    def _unwritten(self, error: OSError) -> ServiceError:
        return ServiceError(f"cannot write {str(self.path)!r}: {error.strerror}")
