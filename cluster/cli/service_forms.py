"""Forms of what a service alone has: memory, durations, resources, ranges of pools, files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cluster.autoscale_options import parse_duration, parse_ranges
from legato.cluster.byte_size import size_text
from legato.cluster.cli.memory_size import parse_fraction, parse_size
from legato.cluster.cli.setting_forms import Form
from legato.cluster.resource_demand import label_text, parse_demand
from legato.protos.tracing import check_installed, read_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KvMemory(Form):
    """A size: an int; or a fraction of what is free: a float."""

    metavar: str = "SIZE|FRACTION"

    def read(self, text: str) -> int | float:
        """See Form."""
        fraction = parse_fraction(text)
        return parse_size(text, ", or a fraction in (0, 1]") if fraction is None else fraction

    def show(self, value: float) -> str:
        """See Form."""
        return size_text(value) if isinstance(value, int) else f"{value:g}"


@dataclass(frozen=True)
class SizeOrNone(Form):
    """A size, or 0."""

    metavar: str = "SIZE"

    def read(self, text: str) -> int:
        """See Form."""
        return 0 if text == "0" else parse_size(text, ", or 0 for none")

    def show(self, value: int) -> str:
        """See Form."""
        return size_text(value)


@dataclass(frozen=True)
class Duration(Form):
    """Seconds, with a unit."""

    metavar: str = "500ms|2s|1m"

    def read(self, text: str) -> float:
        """See Form."""
        return parse_duration(text)

    def show(self, value: float) -> str:
        """See Form."""
        return f"{value * 1000:.9g}ms" if value < 1 else f"{value:.9g}s"


@dataclass(frozen=True)
class Demand(Form):
    """What a worker asks of its node."""

    metavar: str = "NAME=AMOUNT,…"

    def read(self, text: str) -> Any:  # noqa: ANN401  # a ResourceDemand
        """See Form."""
        return parse_demand(text)

    def show(self, value: Any) -> str:  # noqa: ANN401  # as above
        """See Form."""
        amounts = {"CPU": value.cpus, "GPU": value.gpus, "memory": value.memory_bytes}
        named = {name: x for name, x in amounts.items() if x is not None} | dict(value.custom)
        words = [f"{name}={x:.12g}" for name, x in named.items()]
        return ",".join(words + [label_text(key, condition) for key, condition in value.labels])

    def join(self, parts: Mapping[str, str]) -> str:
        """See Form."""
        return ",".join(f"{name}={amount}" for name, amount in parts.items())


@dataclass(frozen=True)
class Ranges(Form):
    """Between which sizes the pools may move."""

    metavar: str = "prefill=MIN..MAX decode=MIN..MAX"

    def read(self, text: str) -> Any:  # noqa: ANN401  # a PoolRange by role
        """See Form."""
        return parse_ranges(text.split())

    def show(self, value: Any) -> str:  # noqa: ANN401  # as above
        """See Form."""
        return self.join(value)

    def join(self, parts: Mapping[str, Any]) -> str:
        """See Form."""
        return " ".join(f"{pool}={sizes}" for pool, sizes in parts.items())


@dataclass(frozen=True)
class AppendedFile(Form):
    """A file's absolute path. Opened now, rather than when it is used half a minute later; one that
    was not there is not there afterwards: the settings may only be looked at.
    """

    metavar: str = "FILE"

    def read(self, text: str) -> str:
        """See Form."""
        path = Path(text).expanduser().absolute()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe may have no reader
        try:
            is_new = not os.path.lexists(path)
            os.close(os.open(path, flags, 0o666))
            if is_new:
                path.unlink()
        except OSError as error:
            raise ValueError(f"cannot append to {text!r}: {error.strerror}") from error
        return str(path)


@dataclass(frozen=True)
class ReadFile(Form):
    """A file's absolute path; it is read, and found wrong, by who uses it."""

    metavar: str = "FILE"

    def read(self, text: str) -> str:
        """See Form."""
        return str(Path(text).expanduser().absolute())


@dataclass(frozen=True)
class Collector(Form):
    """Of OTLP over gRPC."""

    metavar: str = "HOST:PORT"

    def read(self, text: str) -> str:
        """See Form."""
        endpoint = read_endpoint(text)
        check_installed()
        return endpoint


@dataclass(frozen=True)
class Share(Form):
    """A number from 0 to 1."""

    metavar: str = "X"

    @property
    def limits(self) -> str:
        """See Form."""
        return "in [0, 1]"

    def read(self, text: str) -> float:
        """See Form."""
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"must be a number in [0, 1], got {text!r}")
        return share

    def show(self, value: float) -> str:
        """See Form."""
        return f"{value:g}"
