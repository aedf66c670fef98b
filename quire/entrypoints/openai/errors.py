"""The one place that decides what an error looks like to a client.

Invariant: always the shape of the API whose path was asked, OpenAI's `{"error": {"message", "type", "param", "code"}}`
but for those in `SHAPES`, and never the text of an error that nobody wrote for the client: such an error gets a fixed
sentence and the request's id, and its details go to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import (
    ClientError,
    DeadlineError,
    EngineDeadError,
    QuireError,
    StartupError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

ENGINE_DEAD = "The engine has stopped, and the server is ending; try again later."
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
HTTP_ERRORS = {
    404: ("NotFoundError", "There is nothing at this path."),
    405: ("MethodNotAllowedError", "This path does not take this method."),
}


class ErrorDetail(msgspec.Struct):
    """`param` names the field at fault; `code` is the HTTP status where OpenAI has no code of its own."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(msgspec.Struct):
    """An error as OpenAI's clients read it."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """An error as Anthropic's clients read it."""

    type: Literal["error"] = "error"
    error: AnthropicDetail
    request_id: str


class OllamaError(msgspec.Struct):
    """An error as Ollama's clients read it: a sentence."""

    error: str


class CohereError(msgspec.Struct):
    """An error as Cohere's clients read it: a sentence."""

    message: str


def error_body(message: str, kind: str, code: int | str, param: str | None = None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, kind, param, code))


def body_of(error: BaseException, request_id: str) -> ErrorBody:
    """What a client is told about an error; anything unexpected is logged here."""
    if isinstance(error, EngineDeadError):
        return error_body(ENGINE_DEAD, error.type, error.status)
    if isinstance(error, QuireError) and not isinstance(error, StartupError):
        param = error.param if isinstance(error, ClientError) else None
        return error_body(str(error), error.type, error.code or error.status, param)
    logger.error("request %s failed", request_id, exc_info=error)
    sentence = f"The server met an unexpected error; its log tells more about request {request_id}."
    return error_body(sentence, QuireError.type, QuireError.status)


def status_of(error: BaseException) -> int:
    """The HTTP status of the answer to an error."""
    return error.status if isinstance(error, QuireError) else QuireError.status


def anthropic_body(body: ErrorBody, status: int, request_id: str) -> AnthropicError:
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return AnthropicError(error=AnthropicDetail(kind, body.error.message), request_id=request_id)


def ollama_body(body: ErrorBody, status: int, request_id: str) -> OllamaError:
    return OllamaError(body.error.message)


def cohere_body(body: ErrorBody, status: int, request_id: str) -> CohereError:
    return CohereError(body.error.message)


@dataclass(frozen=True)
class Shape:
    """What the errors of one API are: their type, and how one is made of OpenAI's, the status and the request's id."""

    type: type[msgspec.Struct]
    make: Callable[[ErrorBody, int, str], msgspec.Struct]


OPENAI_SHAPE = Shape(ErrorBody, lambda body, status, request_id: body)
ANTHROPIC_SHAPE = Shape(AnthropicError, anthropic_body)
ANTHROPIC_VERSION = "anthropic-version"
"""The header by which Anthropic's clients are known where they share a path with others."""
REQUEST_ID, ANTHROPIC_REQUEST_ID = "x-request-id", "request-id"
SHAPES = {
    "/v1/messages": ANTHROPIC_SHAPE,
    "/api/": Shape(OllamaError, ollama_body),
    "/v2/": Shape(CohereError, cohere_body),
}
"""Start of a path -> the shape of its errors."""


def shape_of(path: str) -> Shape:
    """The shape of a path's errors; the path is without the server's `root_path`."""
    return next((shape for start, shape in SHAPES.items() if path.startswith(start)), OPENAI_SHAPE)


def shaped_error(body: ErrorBody, status: int, scope: Any) -> bytes:
    """The error as JSON, in the shape of the API that was asked."""
    path = _path_of(scope)
    shape = shape_of(path)
    if path.startswith("/v1/models") and ANTHROPIC_VERSION in Headers(scope=scope):
        shape = ANTHROPIC_SHAPE
    return msgspec.json.encode(shape.make(body, status, request_id_of(scope)))


class ErrorResponse(Response):
    """An answer with OpenAI's body, which becomes that of the path's own API when it is sent."""

    media_type = "application/json"

    def __init__(self, body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(body), status, headers)
        self._openai_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = shaped_error(self._openai_body, self.status_code, scope)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def response_of(error: BaseException, request_id: str) -> ErrorResponse:
    """The whole HTTP answer to an error."""
    return ErrorResponse(body_of(error, request_id), status_of(error), _headers(error))


def frame_of(error: BaseException, request_id: str) -> bytes:
    """The server-sent event that ends a stream on an error."""
    return b"data: " + msgspec.json.encode(body_of(error, request_id)) + b"\n\n"


async def handle_quire_error(request: Request, error: Exception) -> Response:
    return response_of(error, request_id_of(request.scope))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    methods = set(headers.get("Allow", "").split(", ")) - {""}
    if methods:
        headers["Allow"] = ", ".join(
            sorted(methods | ({"HEAD"} if "GET" in methods else set()))
        )  # `middleware.head`
    kind, sentence = HTTP_ERRORS.get(error.status_code, ("BadRequestError", "The request cannot be handled."))
    body = error_body(sentence, kind, error.status_code)
    return ErrorResponse(body, error.status_code, headers)


def request_id_of(scope: Any) -> str:
    """Return the id of this HTTP request that its client is told: the client's own, else the server's."""
    return str(scope.get("state", {}).get("request_id", "unknown"))


def id_headers(scope: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers with the id of this HTTP request: `x-request-id`, and for Anthropic's clients `request-id`."""
    names = [REQUEST_ID]
    is_known = "headers" in scope  # else the request's head was never read
    if is_known and (
        shape_of(_path_of(scope)) is ANTHROPIC_SHAPE or ANTHROPIC_VERSION in Headers(scope=scope)
    ):
        names.append(ANTHROPIC_REQUEST_ID)
    return [(name.encode(), request_id_of(scope).encode()) for name in names]


def _path_of(scope: Any) -> str:
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def own_id_of(scope: Any) -> str:
    """Return the id that the server gave this HTTP request, which no other has."""
    return str(scope["state"]["own_id"])


def _headers(error: BaseException) -> dict[str, str] | None:
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, EngineDeadError):
        return {"Retry-After": "5"}
    if isinstance(error, DeadlineError):
        return {
            "x-should-retry": "false"
        }  # OpenAI's clients would ask again for what has just taken too long
    return {"WWW-Authenticate": "Bearer"} if getattr(error, "status", 0) == 401 else None
