"""read_settings: a file of settings, bounded in every way, and where each of its values stands.

Values are the texts of the file, never what YAML makes of them: a setting's form reads them, as it
does those of options and variables, so that `no`, `010` and `1e3` mean the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES = 64 << 10
MAX_DEPTH = 2  # the file's own mapping, and a setting that is one
MAX_EVENTS = 4096
_NULL = "tag:yaml.org,2002:null"
_PLAIN = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))


@dataclass(frozen=True)
class FileValue:
    """A text, or a mapping of texts; `place` is file:line."""

    value: str | dict[str, str]
    place: str


def read_settings(path: Path) -> dict[str, FileValue]:
    """By key; a key whose value is null or nothing is left out.

    Raises:
        ValueError: naming file, line and what is wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; give the name of a YAML file") from None
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; see docs/configuration.md for what "
            "it may hold"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text, from byte {error.start} on") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: must have at most {MAX_FILE_BYTES:,} bytes")
    try:
        _check_events(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: is no YAML: {_words(error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is no YAML: {' '.join(str(error).split())[:200]}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:1: must hold keys and values, such as `model: demo`")
    return _read_mapping(path, root)


def _check_events(path: Path, text: str) -> None:
    """Before anything is built: what could grow without bound is refused."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        mark = event.start_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{place}: anchors and aliases (& and *) are not taken")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{place}: is nested too deep: {MAX_DEPTH} levels are the most")
        if number > MAX_EVENTS:
            raise ValueError(f"{place}: holds more than {MAX_EVENTS:,} parts")


def _read_mapping(path: Path, root: yaml.MappingNode) -> dict[str, FileValue]:
    found: dict[str, FileValue] = {}
    seen: dict[str, str] = {}
    for key_node, node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = _text(path, key_node, "a key")
        if key in seen:
            raise ValueError(f"{place}: {key} is given twice, first at {seen[key]}")
        seen[key] = place
        if isinstance(node, yaml.SequenceNode):
            raise ValueError(f"{place}: {key} must be one value, got a list")
        if isinstance(node, yaml.MappingNode):
            parts: dict[str, str] = {}
            for name_node, part in node.value:
                name = _text(path, name_node, f"a key of {key}")
                if name in parts:
                    line = name_node.start_mark.line + 1
                    raise ValueError(f"{path}:{line}: {key}.{name} is given twice")
                parts[name] = _text(path, part, f"{key}.{name}")
            found[key] = FileValue(parts, place)
        elif node.tag != _NULL:
            found[key] = FileValue(_text(path, node, key), place)
    return found


def _text(path: Path, node: yaml.Node, what: str) -> str:
    place = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{place}: {what} must be one value")
    if node.tag not in _PLAIN:
        raise ValueError(f"{place}: {what} has the tag {node.tag!r}: plain values only")
    text: str = node.value
    return text


def _words(error: yaml.MarkedYAMLError) -> str:
    words = ", ".join(part for part in (error.context, error.problem) if part)
    return " ".join(words.split())[:200]
