"""ConfigFields: a model file's settings, read with their types checked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from legato.worker.weights.checkpoint import CheckpointError
from legato.worker.weights.quoting import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_INTEGER = 2**64 - 1  # what a GGUF file can hold; JSON has no limit of its own


class ConfigFields:
    """Reads values by name; a null counts as absent. Every error names the file and the field.

    `prefix` is put before each name in messages and look-ups ("llama." in GGUF).
    """

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.where = where
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> object:
        """The raw value, or None."""
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        """Whether the field is there, a null included."""
        return self._prefix + name in self._values

    def inside(self, name: str, settings: Mapping[str, object]) -> ConfigFields:
        """The fields of the object `settings`, which field `name` holds."""
        prefix = f"{self._prefix}{name}."
        values = {prefix + key: value for key, value in settings.items()}
        return ConfigFields(values, self.where, prefix)

    def error(self, name: str, problem: str) -> CheckpointError:
        """An error about field `name`."""
        return CheckpointError(f"{self.where}: {self._prefix}{name} {problem}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at most 64 bits; required where `default` is None."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, f"must be a whole number, got {quoted(value)}")
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise self.error(name, f"must be a number of at most 64 bits, got {quoted(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; required where `default` is None."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, got {quoted(value)}")
        if 0 < value <= sys.float_info.max:
            return float(value)
        raise self.error(name, f"must be a finite number above 0, got {quoted(value)}")

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {quoted(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required where `default` is None."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {quoted(value)}")
        return value


def require_causal(fields: ConfigFields) -> None:
    """Refuses a config whose is_causal is anything but true: transformers lets every token of such
    a model see those after it, for a null too.
    """
    if fields.has("is_causal") and fields.get("is_causal") is not True:
        value = fields.get("is_causal")
        raise fields.error("is_causal", f"is {quoted(value)}; only causal models are served")
