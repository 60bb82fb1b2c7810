"""BatchInput: a file of requests, one a line, in OpenAI's batch format."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from legato.cluster.errors import ServiceError, WrongInputError, shown
from legato.cluster.gateway import MAX_REQUEST_BYTES
from legato.cluster.strict_json import parse_json

if TYPE_CHECKING:
    from pathlib import Path

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_CUSTOM_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class LineRef:
    """Where a line stands: a long file is not kept in memory."""

    custom_id: str
    request_hash: str  # see `hash_request`
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class BatchLine:
    """One request."""

    custom_id: str
    url: str
    body: dict[str, Any]


def hash_request(line: BatchLine) -> str:
    """32 hex digits of what is asked for; the order of keys and white space do not count."""
    asked = json.dumps([line.url, line.body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


class BatchInput:
    """Every line is checked before the first is sent: a file that is half wrong costs nothing.

    Raises:
        WrongInputError: the file cannot be read, or naming the first line that is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[LineRef] = []
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise WrongInputError(f"cannot read {str(path)!r}: {error.strerror}") from error
        try:
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, ref: LineRef) -> BatchLine:
        """The line, which was found right before.

        Raises:
            ServiceError: the file has changed since.
        """
        data = os.pread(self._file.fileno(), ref.num_bytes, ref.offset)
        try:
            line = _parse(data)
        except ValueError:
            line = None
        if line is None or line.custom_id != ref.custom_id:
            raise ServiceError(f"{str(self.path)!r} was changed while it was read")
        return line

    def _scan(self) -> None:
        seen: set[str] = set()
        offset = 0
        number = 0
        # A bound on each read: a file without line ends is no batch.
        while data := self._file.readline(MAX_REQUEST_BYTES + 2):
            number += 1
            where = f"{str(self.path)!r}, line {number}"
            if len(data) > MAX_REQUEST_BYTES + 1:
                raise WrongInputError(f"{where} is longer than {MAX_REQUEST_BYTES} bytes")
            if data.strip():
                try:
                    line = _parse(data)
                except ValueError as error:
                    raise WrongInputError(f"{where}: {error}") from error
                name = line.custom_id
                if name in seen:
                    raise WrongInputError(f"{where}: custom_id {shown(name)} comes twice")
                seen.add(name)
                self.lines.append(LineRef(name, hash_request(line), offset, len(data)))
            offset += len(data)
        if not self.lines:
            raise WrongInputError(f"{str(self.path)!r} has no request in it")


def _parse(data: bytes) -> BatchLine:
    """Raises ValueError, in a sentence."""
    value = parse_json(data, "it", one_line=True)
    if not isinstance(value, dict):
        raise ValueError(f"it is {shown(value)}, limit a JSON object")
    for name in value:
        if name not in _FIELDS:
            raise ValueError(f"{shown(name)} is no field of it, limit {', '.join(_FIELDS)}")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise ValueError(
            f"custom_id is {shown(custom_id)}, limit a string of 1 to {MAX_CUSTOM_ID_CHARS} chars"
        )
    if value.get("method") != "POST":
        told = "null" if value.get("method", "") is None else shown(value.get("method"))
        state = f"is {told}" if "method" in value else "is not set"
        raise ValueError(f"method {state}, limit 'POST'")
    if url not in URLS:
        raise ValueError(f"url is {shown(url)}, limit {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {shown(body)}, limit a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream is set; a batch has whole answers")
    if body.get("priority") not in (None, "batch"):
        raise ValueError(
            f"body.priority is {shown(body['priority'])}, limit 'batch': all lines go so"
        )
    return BatchLine(custom_id, url, body)
