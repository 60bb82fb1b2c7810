"""The options of `legato generate` that keep the answer to something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from legato.cluster.cli.guide_option import make_guide
from legato.cluster.errors import ServiceError
from legato.protos import common_pb2

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = '{"type": "object"}'


def test_what_the_options_ask_for(tmp_path: Path) -> None:
    def guide(schema: str | None = None, regex: str | None = None, *choice: str) -> object:
        return make_guide(json_schema=schema, regex=regex, choice=choice)

    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    assert guide() is None
    assert guide(SCHEMA) == guide(str(file)) == common_pb2.Guide(json_schema=SCHEMA)
    assert guide(f"  {SCHEMA}") == common_pb2.Guide(json_schema=f"  {SCHEMA}")
    assert guide(None, "a+") == common_pb2.Guide(regex="a+")
    choice = common_pb2.GuideChoice(texts=["yes", "no"])
    assert guide(None, None, "yes", "no") == common_pb2.Guide(choice=choice)


def test_what_does_not_go_together_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"^--json-schema and --choice do not go together"):
        make_guide(json_schema=SCHEMA, regex=None, choice=["a"])
    with pytest.raises(ServiceError, match=r"no.json: cannot be read: No such file or directory"):
        make_guide(json_schema=str(tmp_path / "no.json"), regex=None, choice=[])
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ServiceError, match=r"odd.json: cannot be read: 'utf-8' codec"):
        make_guide(json_schema=str(tmp_path / "odd.json"), regex=None, choice=[])
    with pytest.raises(ServiceError, match=r"--json-schema .*: cannot be read"):
        make_guide(json_schema="a\0b", regex=None, choice=[])
