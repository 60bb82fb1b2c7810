"""describe: the OpenAPI document, with the bodies that the routes read by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from legato.cluster.http.answer_schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import FastAPI

    from legato.cluster.http.shared_fields import SharedFields

_REF = "#/components/schemas/{model}"
_STATUSES = {
    400: "A field is wrong, unknown or not served.",
    401: "No credentials, or wrong ones.",
    404: "No such model.",
    409: "The request has been taken up by a newer call.",
    413: "The body is too large.",
    415: "The body is not said to be JSON in UTF-8, or is compressed.",
    429: "The queue is full, or the deadline cannot be met; `Retry-After` tells when to ask again.",
    500: "A fault of ours, or a model whose logits are not finite.",
    503: "No worker, or the service ends.",
    504: "The deadline has passed.",
}
_HEADERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "x-request-timeout-s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
        "The request's deadline, in seconds from now.",
    ),
    (
        "x-request-id",
        {"type": "string", "maxLength": 100, "pattern": "^[!-~]*$"},
        "Part of the request's id.",
    ),
)


def _json(schema: str, description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}
    return {"description": description, "content": content}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _json("Error", _STATUSES[status]) for status in statuses}


def gets(schema: str, *errors: int, **others: str) -> dict[str, Any]:
    """For a route that answers with `schema`, or with those errors; for `openapi_extra`."""
    also = {status.removeprefix("as_"): _json(schema, text) for status, text in others.items()}
    return {"responses": {"200": _json(schema, "The answer."), **_errors(*errors), **also}}


def texts(*media_types: str, errors: Iterable[int] = ()) -> dict[str, Any]:
    """For a route that answers with text, which is no JSON; its `response_class` is Response."""
    content = {media_type: {"schema": {"type": "string"}} for media_type in media_types}
    answer = {"description": "The answer.", "content": content}
    return {"responses": {"200": answer, **_errors(401, *errors)}}


def posts(model: type[SharedFields], answer: str) -> dict[str, Any]:
    """For a route that reads `model` from its body and answers with `answer`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    whole = _json(answer, "The whole answer, or with `stream` its chunks as they come.")
    whole["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": whole, **_errors(*_STATUSES)},
        "parameters": [
            {"name": name, "in": "header", "schema": schema, "description": text}
            for name, schema, text in _HEADERS
        ],
    }


def describe(app: FastAPI, *models: type[SharedFields]) -> None:
    """`app.openapi()`, and GET /openapi.json, have the schemas of `models` too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                routes=app.routes,
            )
            _, definitions = models_json_schema(
                [(model, "validation") for model in models], ref_template=_REF
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            schemas.update(SCHEMAS)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does it
