"""create_app: the OpenAI-compatible routes of one router."""

from __future__ import annotations

import math
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request  # noqa: TC002  # FastAPI reads the annotations
from starlette.responses import Response  # noqa: TC002  # FastAPI reads the annotations

from legato.cluster.errors import invalid, shown
from legato.cluster.http.answer_form import AnswerForm, ChatForm, TextForm
from legato.cluster.http.chat_fields import ChatFields
from legato.cluster.http.completion import Wanted
from legato.cluster.http.completion_fields import CompletionFields
from legato.cluster.http.conversion import chat_request, completion_requests
from legato.cluster.http.error_response import (
    MODEL_NOT_FOUND,
    NO_SUCH_ROUTE,
    WRONG_METHOD,
    HttpError,
    error_response,
    json_response,
    wrong_field,
)
from legato.cluster.http.field_names import FieldNames
from legato.cluster.http.field_reading import read_fields
from legato.cluster.http.front_door import FrontDoor
from legato.cluster.http.generation import GenerationResponse
from legato.cluster.http.openapi import describe, gets, posts
from legato.cluster.http.posted import read_posted
from legato.cluster.http.request_body import read_object
from legato.cluster.page.routes import add_page
from legato.cluster.request import MAX_N

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.cluster.http.front_door import Authorize
    from legato.cluster.http.shared_fields import SharedFields
    from legato.cluster.router import Router
    from legato.protos import generation_pb2

MAX_REQUEST_ID_CHARS = 100  # what the router makes of it is a little longer
MAX_TIMEOUT_S = 1e9
TIMEOUT_HEADER = "x-request-timeout-s"


def create_app(router: Router, *, authorize: Authorize | None = None) -> FastAPI:
    """An ASGI application that serves by `router`, in whose event loop it must run.

    `authorize` gets the Authorization header of all requests but those for /health, and raises
    RequestError where it does not let them pass.
    """
    app = FastAPI(
        title="Legato",
        summary="OpenAI-compatible completions.",
        version=router.version,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a POST is not to be asked again, nor by the client's own Host
    )
    app.add_middleware(FrontDoor, authorize=authorize)
    app.add_exception_handler(HTTPException, _routing_error)
    started = int(time.time())

    @app.get("/health", openapi_extra=gets("Health", as_503="No requests are served."))
    async def health() -> Response:
        """200 while requests are served, else 503; and for who takes this port for the other."""
        ports = {"grpc_port": router.grpc_port}
        if router.ready:
            return json_response({"status": "ok", **ports})
        reason = router.missing()
        return json_response({"status": "unavailable", "reason": reason, **ports}, 503)

    @app.get("/v1/models", openapi_extra=gets("Models", 401))
    async def models() -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [_model(router, started)]})

    @app.get("/v1/models/{model:path}", openapi_extra=gets("Model", 401, 404))
    async def model(model: str) -> Response:
        """The one model, by its name."""
        _check_model(router, model)
        return json_response(_model(router, started))

    @app.post("/v1/completions", openapi_extra=posts(CompletionFields, "Completion"))
    async def completions(request: Request) -> Response:
        """Completes text or tokens as they stand."""
        with router.reads(chat=False):
            fields, requests = await read_posted(router, request, _completion)
            return _generation(
                router,
                request,
                fields,
                requests,
                TextForm(),
                FieldNames.of_completion(fields),
                echo=bool(fields.echo),
                logprobs=fields.logprobs is not None,
            )

    @app.post("/v1/chat/completions", openapi_extra=posts(ChatFields, "ChatCompletion"))
    async def chat_completions(request: Request) -> Response:
        """The next message of a chat."""
        with router.reads(chat=True):
            fields, asked = await read_posted(router, request, _chat)
            return _generation(
                router,
                request,
                fields,
                [asked],
                ChatForm(),
                FieldNames.of_chat(fields),
                echo=False,
                logprobs=bool(fields.logprobs),
            )

    add_page(app, router)
    describe(app, ChatFields, CompletionFields)
    return app


def _completion(
    body: bytes,
) -> tuple[CompletionFields, Sequence[generation_pb2.GenerateRequest]]:
    fields = read_fields(read_object(body), CompletionFields)
    with FieldNames.of_completion(fields).used():
        return fields, completion_requests(fields)


def _chat(body: bytes) -> tuple[ChatFields, generation_pb2.GenerateRequest]:
    fields = read_fields(read_object(body), ChatFields)
    with FieldNames.of_chat(fields).used():
        return fields, chat_request(fields)


def _generation(
    router: Router,
    http: Request,
    fields: SharedFields,
    requests: Sequence[generation_pb2.GenerateRequest],
    form: AnswerForm,
    names: FieldNames,
    *,
    echo: bool,
    logprobs: bool,
) -> GenerationResponse:
    if fields.model is not None:
        _check_model(router, fields.model)
    num_answers = 1 if fields.n is None else fields.n
    if not 1 <= num_answers <= MAX_N:  # a place for each is made before the router refuses it
        raise wrong_field("n", f" is {num_answers}, limit [1, {MAX_N}]")
    request_id = _request_id(http)
    for number, request in enumerate(requests):
        request.request_id = f"{request_id}-{number}" if len(requests) > 1 else request_id
    wanted = Wanted(
        requests=requests,
        form=form,
        names=names,
        id=form.id_prefix + request_id,
        model=router.model_name,
        num_answers=num_answers,
        echo=echo,
        logprobs=logprobs,
        token_ids=bool(fields.return_token_ids),
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
    )
    return GenerationResponse(router, wanted, _time_left_s(http), http.headers)


def _request_id(http: Request) -> str:
    """The client's, made unique: others, or a retry, may come with the same one."""
    given, made = http.headers.get("x-request-id", ""), uuid.uuid4().hex
    if len(given) > MAX_REQUEST_ID_CHARS or not all("!" <= char <= "~" for char in given):
        raise invalid(
            f"x-request-id is {shown(given)}, limit {MAX_REQUEST_ID_CHARS} printable ASCII "
            "characters"
        )
    return f"{given}-{made[:8]}" if given else made


def _time_left_s(http: Request) -> float | None:
    given = http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"{TIMEOUT_HEADER} is {shown(given)}, limit (0, {MAX_TIMEOUT_S:g}]")
    return seconds


def _check_model(router: Router, asked: str) -> None:
    if asked != router.model_name:
        raise HttpError(
            MODEL_NOT_FOUND,
            f"model is {shown(asked)}, limit {shown(router.model_name)}",
            param="model",
        )


def _model(router: Router, started: int) -> dict[str, Any]:
    limits = router.pool.limits()
    return {
        "id": router.model_name,
        "object": "model",
        "created": started,
        "owned_by": "legato",
        # Not known before the first worker is there.
        "max_model_len": None if limits is None else limits.context_length,
    }


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    if error.status_code == 405:
        found = HttpError(WRONG_METHOD, f"{request.url.path} takes no {request.method}")
    else:
        found = HttpError(NO_SUCH_ROUTE, f"there is no {request.method} {request.url.path}")
    response = error_response(found)
    response.headers.update(error.headers or {})
    return response
