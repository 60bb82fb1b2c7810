"""describe: the OpenAPI document, with the bodies that the routes read by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

if TYPE_CHECKING:
    from fastapi import FastAPI

    from legato.cluster.http.shared_fields import SharedFields

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
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


def posts(model: type[SharedFields]) -> dict[str, Any]:
    """For a route that reads `model` from its body, for FastAPI's `openapi_extra`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    errors = {
        str(status): {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
        }
        for status, text in _STATUSES.items()
    }
    answer = {
        "description": "The whole answer, or with `stream` its chunks as they come.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer, **errors},
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
            schemas["Error"] = _ERROR
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does it
