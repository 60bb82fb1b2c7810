"""Tokens of clients: what a file may hold, what a header must, and what nobody ever sees."""

from __future__ import annotations

import hmac
import logging
import os
from typing import TYPE_CHECKING

import grpc
import pytest

from legato.cluster import credentials
from legato.cluster.caller import Caller
from legato.cluster.credentials import LOG_PERIOD_S, LOOK_PERIOD_S, Credentials, read_tokens
from legato.cluster.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "old-token-of-a-client-1", "new-token-of-a-client-2"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def written(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    os.utime(path, ns=(0, path.stat().st_size))  # another stamp for other contents
    return str(path)


def refusal(tokens: Credentials, header: str | None) -> str:
    with pytest.raises(RequestError) as raised:
        tokens.check(header)
    assert raised.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert "--token-file" in raised.value.message  # the way out
    return raised.value.message


def test_comments_and_empty_lines_are_no_tokens(tmp_path: Path) -> None:
    path = written(tmp_path / "t", "# of Monday", "", OLD, f"  {NEW}  ", "")
    assert read_tokens(path) == [OLD, NEW]


@pytest.mark.parametrize(
    "token", ["short", "has a space in its middle", "x" * 513, "tökens-of-clients"]
)
def test_what_is_no_token_is_named_by_its_line_alone(tmp_path: Path, token: str) -> None:
    path = written(tmp_path / "t", OLD, token)
    with pytest.raises(ValueError, match="line 2") as raised:
        read_tokens(path)
    assert token not in str(raised.value)


def test_a_file_that_is_absent_empty_or_huge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        Credentials(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="has no token"):
        Credentials(written(tmp_path / "empty", "# nobody yet"))
    with pytest.raises(ValueError, match=r"1025 tokens, limit 1024"):
        read_tokens(written(tmp_path / "many", *(f"token-number-{i:08}" for i in range(1025))))
    with pytest.raises(ValueError, match="more than"):
        read_tokens(written(tmp_path / "huge", "#" * (credentials.MAX_FILE_BYTES + 1)))


def test_a_line_may_say_whose_a_token_is_and_what_for(tmp_path: Path) -> None:
    lines = (
        OLD,
        f"acme: {NEW}",
        "acme client:third-token-of-acme",
        "ops  admin : fourth-token-000",
    )
    path = written(tmp_path / "t", *lines)
    assert read_tokens(path) == [OLD, NEW, "third-token-of-acme", "fourth-token-000"]
    tokens = Credentials(path)
    callers = [tokens.check(f"Bearer {token}") for token in read_tokens(path)]
    acme = Caller("acme", "client")
    assert callers == [Caller("", "admin"), acme, acme, Caller("ops", "admin")]
    assert "none of this service's" in refusal(tokens, f"Bearer acme: {NEW}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"acme root: {NEW}", "line 2: a role is admin or client"),
        (f"acme: {OLD}", "line 2: another line has this token, with another name or role"),
        (f"a b c: {NEW}", "line 2: a token has 16 to"),
        (f"{'x' * 65}: {NEW}", "line 2: a token has 16 to"),
        ("acme:", "line 2: a token has 16 to"),
    ],
)
def test_a_wrong_name_or_role_is_refused_and_not_shown(
    tmp_path: Path, line: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as raised:
        read_tokens(written(tmp_path / "t", OLD, line))
    assert OLD not in str(raised.value)
    assert NEW not in str(raised.value)


def test_no_salt_is_that_of_another_tenant() -> None:
    callers = [Caller(), Caller("a"), Caller("ab"), Caller("b")]
    salts = ["", "a", "b", "ab", "b\x1f"]
    made = [caller.salt(salt) for caller in callers for salt in salts]
    assert len(set(made)) == len(made)
    # What a request without a tenant may ask for is printable, and so never one of theirs.
    assert all(salt.startswith("\x1f") for caller in callers[1:] for salt in [caller.salt("a")])
    assert all(len(salt.encode()) <= 65 for salt in made)


@pytest.mark.parametrize("header", [f"Bearer {OLD}", f"bearer {OLD}", f"BEARER  {OLD} "])
def test_a_token_is_known_by_its_header(tmp_path: Path, header: str) -> None:
    Credentials(written(tmp_path / "t", NEW, OLD)).check(header)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", OLD, f"Basic {OLD}", f"Bearer {OLD}x", f"Bearer {OLD[:-1]}",
     f"Bearer {OLD.upper()}", "Bearer " + "x" * 100_000, "Bearer \udc80", f"Bearer {OLD} {NEW}"],
)  # fmt: skip
def test_any_other_header_is_refused_and_not_shown(tmp_path: Path, header: str | None) -> None:
    message = refusal(Credentials(written(tmp_path / "t", OLD)), header)
    assert OLD not in message
    assert "xxx" not in message


def test_every_token_is_compared_with_whichever_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Credentials(written(tmp_path / "t", *(f"token-number-{i:08}" for i in range(9))))
    compared: list[int] = []
    real = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one) + len(other))
        return real(one, other)

    monkeypatch.setattr(credentials.hmac, "compare_digest", counted)
    tokens.check("Bearer token-number-00000000")
    refusal(tokens, "Bearer token-number-00000009")
    assert compared == [64] * 18  # hashes, of one length each


def test_tokens_change_with_their_file(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "t"
    tokens = Credentials(written(path, OLD), now=clock)
    refusal(tokens, f"Bearer {NEW}")
    written(path, OLD, NEW)
    clock.now_s += LOOK_PERIOD_S
    tokens.check(f"Bearer {NEW}")
    tokens.check(f"Bearer {OLD}")
    written(path, NEW)
    tokens.check(f"Bearer {OLD}")  # looked at once a second, not at every call
    clock.now_s += LOOK_PERIOD_S
    refusal(tokens, f"Bearer {OLD}")
    written(path, "# all are taken back")
    clock.now_s += LOOK_PERIOD_S
    refusal(tokens, f"Bearer {NEW}")


@pytest.mark.parametrize("broken", [None, "short"])
def test_a_wrong_or_absent_file_leaves_the_tokens_before_it(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "t"
    tokens = Credentials(written(path, OLD), now=clock)
    if broken is None:
        path.unlink()
    else:
        written(path, NEW, broken)
    clock.now_s += LOOK_PERIOD_S
    tokens.check(f"Bearer {OLD}")
    refusal(tokens, f"Bearer {NEW}")
    assert "the tokens before it stay" in caplog.text


def test_a_flood_of_wrong_tokens_writes_few_lines_and_none_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tokens = Credentials(written(tmp_path / "t", OLD), now=clock)
    with caplog.at_level(logging.DEBUG):
        for _ in range(1000):
            refusal(tokens, "Bearer guessed-by-somebody-1")
        assert len(caplog.records) == 1
        clock.now_s += LOG_PERIOD_S
        refusal(tokens, "Bearer guessed-by-somebody-1")
    assert [record.getMessage() for record in caplog.records][1].endswith(": 1001")
    assert "guessed" not in caplog.text


def test_nothing_of_a_token_is_kept(tmp_path: Path) -> None:
    tokens = Credentials(written(tmp_path / "t", OLD))
    assert OLD not in repr(vars(tokens))
