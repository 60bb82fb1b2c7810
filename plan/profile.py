"""Profile: what `legato profile` measured of a machine with a model, as a file of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from pathlib import Path

VERSION: Literal[1] = 1
MAX_FILE_BYTES = 1 << 20
Seconds = Field(gt=0, allow_inf_nan=False)
Count = Field(ge=1, le=2**31 - 1)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PrefillPoint(_Part):
    """One prompt alone: so many tokens computed behind so many that were cached."""

    num_tokens: int = Count
    context_tokens: int = Field(ge=0, le=2**31 - 1)
    seconds: float = Seconds


class DecodePoint(_Part):
    """One decode step as a client sees it, of sequences that each have so many rows of KV."""

    num_sequences: int = Count
    context_tokens: int = Count
    seconds: float = Seconds


class HandoffPoint(_Part):
    """What the gap between the first two tokens is beyond a decode step, by the prompt's length."""

    num_tokens: int = Count
    seconds: float = Field(ge=0, allow_inf_nan=False)


class ProfiledWorker(_Part):
    """What was measured, as a worker is told it."""

    model: str
    device: str
    dtype: str
    weights: str
    kv_cache: str
    num_threads: int | None = Field(None, ge=1)
    kv_memory_bytes: int = Field(ge=1)
    max_batch_size: int = Count
    context_length: int = Count
    block_size: int = Count


class ProfiledMachine(_Part):
    """Where it was measured."""

    name: str  # of its processor or GPU
    num_cores: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)  # of the device


class Profile(_Part):
    """Times are medians, in seconds."""

    version: Literal[1] = VERSION
    legato_version: str
    machine: ProfiledMachine
    worker: ProfiledWorker
    weight_bytes: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=1)
    prefill: list[PrefillPoint] = Field(min_length=2)
    decode: list[DecodePoint] = Field(min_length=2)
    handoff: list[HandoffPoint] = Field(min_length=1)
    link_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)  # of KV between workers here
    request_overhead_s: float = Field(ge=0, allow_inf_nan=False)  # TTFT beyond the prefill itself
    # Gaps between tokens over the step's median, by quantiles in equal distances: their jitter.
    step_jitter: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        min_length=1, max_length=1000
    )
    # How much longer each takes while the other pool is busy on the same machine; at least 1.
    prefill_slowdown: float = Field(ge=1, allow_inf_nan=False)
    decode_slowdown: float = Field(ge=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_points(self) -> Profile:
        if len({p.num_tokens for p in self.prefill if not p.context_tokens}) < 2:
            raise ValueError("prefill must have two lengths without context")
        if len({p.num_sequences for p in self.decode}) < 2:
            raise ValueError("decode must have two numbers of sequences")
        return self

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            path.write_text(json.dumps(self.model_dump(), indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{path}: cannot be written: {error.strerror}") from error


def read_profile(path: Path) -> Profile:
    """A file that `legato profile` wrote.

    Raises:
        ValueError: it cannot be read, is of another version, or has a key or value that it must
            not have; the message names it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: must have at most {MAX_FILE_BYTES:,} bytes")
    try:
        return Profile.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path}: {name}: {first['msg']}; `legato profile` writes such a file"
        ) from error
