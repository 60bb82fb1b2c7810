"""Every error of the public services has a reason and a remedy; a wrong field is named in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from legato.cluster.error_reasons import Reason, violation_of
from legato.cluster.error_status import trailers_of
from legato.cluster.errors import RequestError, invalid, unavailable
from legato.protos import cluster_pb2, common_pb2, generation_pb2
from legato.protos.status_details import (
    DETAILS_KEY,
    DOMAIN,
    MAX_SENTENCE_BYTES,
    Violation,
    read_details,
    sentence,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# Trailers of one error, as HTTP/2 counts them; gRPC's clients take 8 KiB of all metadata.
MAX_TRAILER_BYTES = 6500
REQUESTS = (
    generation_pb2.GenerateRequest,
    generation_pb2.TokenizeRequest,
    generation_pb2.DetokenizeRequest,
    common_pb2.SamplingParams,
    cluster_pb2.ScalePoolRequest,
    cluster_pb2.ChangeRoleRequest,
    cluster_pb2.DrainWorkerRequest,
    cluster_pb2.DrainNodeRequest,
    cluster_pb2.ShutdownRequest,
)
FIELDS = {name for message in REQUESTS for name in message.DESCRIPTOR.fields_by_name} | {"prompt"}


def status_of(error: RequestError) -> status_pb2.Status:
    [value] = [value for key, value in trailers_of(error) if key == DETAILS_KEY]
    assert isinstance(value, bytes)
    return status_pb2.Status.FromString(value)


def unpacked(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for detail in status.details:
        name = detail.TypeName().removeprefix("google.rpc.")
        message = getattr(error_details_pb2, name)()
        assert detail.Unpack(message)
        found[name] = message
    return found


# --- reasons ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_a_reason_is_for_programs_and_its_remedy_for_people(reason: Reason) -> None:
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{1,61}[A-Z0-9]", reason.name), "as google.rpc wants it"
    assert 20 <= len(reason.remedy) <= 200
    assert reason.remedy[0].isupper()
    assert reason.remedy.endswith(".")
    error = RequestError(reason.code, "why", reason=reason)
    details = unpacked(status_of(error))
    info, text = details["ErrorInfo"], details["LocalizedMessage"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert isinstance(text, error_details_pb2.LocalizedMessage)
    assert (info.reason, info.domain, text.message) == (reason.name, DOMAIN, reason.remedy)
    assert read_details(trailers_of(error)).remedy == reason.remedy


def test_the_documentation_has_all_reasons_and_no_others() -> None:
    documented = re.findall(
        r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", (ROOT / "docs/api.md").read_text(), re.M
    )
    assert sorted(documented) == sorted((reason.name, reason.code.name) for reason in Reason)


def test_a_reason_of_another_code_is_our_own_fault() -> None:
    with pytest.raises(AssertionError):
        RequestError(grpc.StatusCode.INTERNAL, "x", reason=Reason.OVERLOADED)


def calls(*names: str) -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted((ROOT / "cluster").rglob("*.py")):
        if "http" in path.parts:  # that endpoint's fields are OpenAI's
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield path, node


def test_every_code_that_is_raised_has_a_reason() -> None:
    used = {
        ast.unparse(call.args[0]).removeprefix("grpc.StatusCode.")
        for _, call in calls("RequestError")
        if call.args
    }
    known = {reason.code.name for reason in Reason}
    assert used - {"code"} <= known, "one that another's code is passed on in is `code`"
    assert len(used) >= 7
    assert all(Reason.of(reason.code).code is reason.code for reason in Reason)
    assert Reason.of(grpc.StatusCode.DATA_LOSS) is Reason.INTERNAL_FAULT


# --- fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "field", "value", "limit"),
    [
        ("sampling.top_p is 1.5, limit (0, 1]", "sampling.top_p", "1.5", "(0, 1]"),
        ("sampling.stop[3] has 2000 chars, limit 1024", "sampling.stop[3]", "2000 chars", "1024"),
        ("text is empty, limit at least 1 token", "text", "empty", "at least 1 token"),
        ("prompt has 600 tokens, limit 511: the context is 512", "prompt", "600 tokens", "511"),
        ("resume.answers[2].token_ids[0] is 9, limit 7", "resume.answers[2].token_ids[0]", "9",
         "7"),
        ("messages: the model's chat template is broken: x", "messages",
         "the model's chat template is broken: x", ""),
        ("the prompt has U+2603 at character 3, limit characters that tokens can spell", "prompt",
         "U+2603 at character 3", "characters that tokens can spell"),
        ("prompt of 9 tokens + max_tokens 2 needs 10, limit 8: the pool", "prompt",
         "of 9 tokens + max_tokens 2 needs 10", "8"),
        ("sampling.logit_bias[-1] has token id -1, limit [0, 9]", "sampling.logit_bias[-1]",
         "token id -1", "[0, 9]"),
        ("targets[0].target is 9, limit [0, 4]: the size of the prefill pool",
         "targets[0].target", "9", "[0, 4]"),
    ],
)  # fmt: skip
def test_the_sentence_tells_field_value_and_limit(
    message: str, field: str, value: str, limit: str
) -> None:
    assert violation_of(message) == Violation(field, value, limit)
    details = unpacked(status_of(invalid(message)))
    info, bad = details["ErrorInfo"], details["BadRequest"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert isinstance(bad, error_details_pb2.BadRequest)
    expected = {"field": field, "value": value, "limit": limit}
    assert dict(info.metadata) == {name: text for name, text in expected.items() if text}
    [violation] = bad.field_violations
    assert (violation.field, violation.description) == (field, message)
    assert read_details(trailers_of(invalid(message))).violation == Violation(field, value, limit)


def filled(template: ast.expr) -> str | None:
    """What an f-string might say; None of a sentence that is made elsewhere."""
    if isinstance(template, ast.Constant):
        return str(template.value)
    if not isinstance(template, ast.JoinedStr):
        return None
    parts = []
    for place, part in enumerate(template.values):
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif place == 0:  # a field
            parts.append("sampling.stop[3]")
        else:  # a part of a field, or a value
            parts.append("seed" if parts[-1].endswith(".") else "7")
    return "".join(parts)


def test_every_sentence_of_a_wrong_field_names_one_of_the_protos() -> None:
    found, elsewhere = [], []
    for path, call in calls("invalid"):
        said = filled(call.args[0])
        if said is None:
            elsewhere.append(path.name)
            continue
        violation = violation_of(said)
        assert violation is not None, said
        assert re.split(r"[.\[]", violation.field)[0] in FIELDS | {"sampling"}, said
        found.append(said)
    assert len(found) > 50
    assert set(elsewhere) <= {
        "cluster_service.py",
        "request.py",
        "safe_encoder.py",
        "sampling_rules.py",
    }, elsewhere


# --- size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("char", ["x", "%", "\n", "é", "😀"])
def test_trailers_stay_small_whatever_is_said(char: str) -> None:
    error = invalid(f"text is {char * 100_000}, limit {char * 100_000}")
    said = sentence(error.message)
    status = status_of(error)
    assert status.message == said, "clients compare the two"
    quoted = sum(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode()) for c in said)
    assert MAX_SENTENCE_BYTES // 2 < quoted <= MAX_SENTENCE_BYTES + 10
    # Binary trailers go in base64.
    size = sum(len(key) + 32 + len(value) * 4 // 3 for key, value in trailers_of(error)) + quoted
    assert size <= MAX_TRAILER_BYTES


def test_what_is_short_is_told_as_it_is() -> None:
    assert sentence("n is 0, limit [1, 128]") == "n is 0, limit [1, 128]"


def test_a_hint_is_in_the_details_only_where_a_retry_helps() -> None:
    assert read_details(trailers_of(unavailable("gone"))).retry_after_s == 1.0
    assert read_details(trailers_of(invalid("n is 0, limit 1"))).retry_after_s is None
    final = RequestError(
        grpc.StatusCode.UNAVAILABLE,
        "it failed",
        retry_after_ms=5,
        is_final=True,
        reason=Reason.FAILS_ON_EVERY_WORKER,
    )
    details = read_details(trailers_of(final))
    assert details.retry_after_s is None
    assert details.reason == "FAILS_ON_EVERY_WORKER"
    assert ("legato-retry", "never") in trailers_of(final)
