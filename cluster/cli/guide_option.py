"""make_guide: the guide that a command's options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from legato.cluster.errors import WrongInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.protos import common_pb2


def make_guide(
    *, json_schema: str | None, regex: str | None, choice: Sequence[str]
) -> common_pb2.Guide | None:
    """None where nothing was asked for. `json_schema`: the name of a file, or JSON text.

    Raises:
        WrongInputError: more than one was asked for, or the file cannot be read.
    """
    from legato.protos import common_pb2

    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if len(names) > 1:
        raise WrongInputError(f"{' and '.join(names)} do not go together: give one of them")
    if json_schema is not None:
        return common_pb2.Guide(json_schema=_schema_text(json_schema))
    if regex is not None:
        return common_pb2.Guide(regex=regex)
    return common_pb2.Guide(choice=common_pb2.GuideChoice(texts=choice))


def _schema_text(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WrongInputError(
            f"--json-schema {given}: cannot be read: {reason}; give a file, or JSON that begins "
            "with {"
        ) from error
