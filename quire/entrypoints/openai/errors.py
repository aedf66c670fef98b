# SPDX-License-Identifier: Apache-2.0
"""HTTP form of all errors, and JSON responses from msgspec structs.

Invariant: an error has the shape of the API at the requested path: OpenAI's `{"error": {"message", "type", "param",
"code"}}` except for `SHAPES`. Unexpected errors get a fixed sentence with the request's id; their details go to the log
only.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
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
    404: ("NotFoundError", ""),
    405: ("MethodNotAllowedError", "This path takes other methods."),
}
# Header that identifies Anthropic's clients on paths shared with other APIs.
ANTHROPIC_VERSION = "anthropic-version"
_NO_MODELFILES = (
    "models come from Hugging Face or a directory, and defaults from --override-generation-config"
)
ABSENT_PATHS = {
    "/api/create": _NO_MODELFILES,
    "/api/copy": "a model gets further names by --served-model-name",
    "/api/push": "nothing is uploaded",
}
"""Ollama's paths that clients try and no server here has -> what to do instead."""
MAX_PATH_CHARS = 80  # Of an unknown path, in the message about it.
REQUEST_ID, ANTHROPIC_REQUEST_ID = "x-request-id", "request-id"


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


class ErrorDetail(msgspec.Struct):
    """OpenAI's error fields: `param` is the invalid field; `code` is the HTTP status unless OpenAI defines a code."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(msgspec.Struct):
    """Error body of OpenAI's API."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Error body of Anthropic's API."""

    type: Literal["error"] = "error"
    error: AnthropicDetail
    request_id: str


class OllamaError(msgspec.Struct):
    """Error body of Ollama's API."""

    error: str


class CohereError(msgspec.Struct):
    """Error body of Cohere's API."""

    message: str


def error_body(message: str, kind: str, code: int | str, param: str | None = None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, kind, param, code))


def body_of(error: BaseException, request_id: str) -> ErrorBody:
    """Return the error body for the client; unexpected errors are logged here."""
    if isinstance(error, EngineDeadError):
        return error_body(ENGINE_DEAD, error.type, error.status)
    if isinstance(error, QuireError) and not isinstance(error, StartupError):
        param = error.param if isinstance(error, ClientError) else None
        return error_body(str(error), error.type, error.code or error.status, param)
    logger.error("request %s failed", request_id, exc_info=error)
    sentence = f"The server met an unexpected error; see its log for request {request_id}."
    return error_body(sentence, QuireError.type, QuireError.status)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, QuireError) else QuireError.status


def anthropic_body(body: ErrorBody, status: int, request_id: str) -> AnthropicError:
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return AnthropicError(error=AnthropicDetail(kind, body.error.message), request_id=request_id)


def ollama_body(body: ErrorBody, status: int, request_id: str) -> OllamaError:
    return OllamaError(body.error.message)


def cohere_body(body: ErrorBody, status: int, request_id: str) -> CohereError:
    return CohereError(body.error.message)


@dataclass(frozen=True)
class ErrorShape:
    """Error shape of one API: its type, and a function from OpenAI's body, status and request id to it."""

    type: type[msgspec.Struct]
    make: Callable[[ErrorBody, int, str], msgspec.Struct]


OPENAI_SHAPE = ErrorShape(ErrorBody, lambda body, status, request_id: body)
ANTHROPIC_SHAPE = ErrorShape(AnthropicError, anthropic_body)
SHAPES = {
    "/v1/messages": ANTHROPIC_SHAPE,
    "/api/": ErrorShape(OllamaError, ollama_body),
    "/v2/": ErrorShape(CohereError, cohere_body),
}  # Path prefix -> shape of its errors.


def shape_of(path: str) -> ErrorShape:
    """Return the shape of a path's errors; the path excludes the server's `root_path`."""
    return next((shape for start, shape in SHAPES.items() if path.startswith(start)), OPENAI_SHAPE)


def shaped_error(body: ErrorBody, status: int, scope: Any) -> bytes:
    """Return the error as JSON in the shape of the requested API."""
    path = _path_of(scope)
    shape = shape_of(path)
    if path.startswith("/v1/models") and ANTHROPIC_VERSION in Headers(scope=scope):
        shape = ANTHROPIC_SHAPE
    return msgspec.json.encode(shape.make(body, status, request_id_of(scope)))


class ErrorResponse(Response):
    """Error response that takes the shape of the path's API when it is sent."""

    media_type = "application/json"

    def __init__(self, body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(body), status, headers)
        self._openai_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = shaped_error(self._openai_body, self.status_code, scope)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def response_of(error: BaseException, request_id: str) -> ErrorResponse:
    """Return the complete HTTP response of an error."""
    return ErrorResponse(body_of(error, request_id), status_of(error), _headers(error))


def frame_of(error: BaseException, request_id: str) -> bytes:
    """Return the server-sent event that ends a stream with an error."""
    return b"data: " + msgspec.json.encode(body_of(error, request_id)) + b"\n\n"


async def handle_quire_error(request: Request, error: Exception) -> Response:
    return response_of(error, request_id_of(request.scope))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Convert Starlette's own errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    methods = set(headers.get("Allow", "").split(", ")) - {""}
    if methods:
        headers["Allow"] = ", ".join(
            sorted(methods | ({"HEAD"} if "GET" in methods else set()))
        )  # see `middleware.auth.Head`
    kind, sentence = HTTP_ERRORS.get(error.status_code, ("BadRequestError", "The request cannot be handled."))
    if error.status_code == 404:
        sentence = _nothing_at(request)
    elif methods:
        sentence = f"This path takes {headers['Allow']}, not {request.method:.20}."
    body = error_body(sentence, kind, error.status_code)
    return ErrorResponse(body, error.status_code, headers)


def _nothing_at(request: Request) -> str:
    """Return the sentence for an unknown path, with the path that the client may mean."""
    path = _path_of(request.scope)
    if path in ABSENT_PATHS:
        return f"{path} does not exist here: {ABSENT_PATHS[path]}."
    paths: list[str] = request.app.state.document.paths
    ending = [known for known in paths if path != "/" and known.endswith(path)]
    near = ending[:1] or difflib.get_close_matches(path[:MAX_PATH_CHARS], paths, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"There is nothing at {path:.{MAX_PATH_CHARS}}; {hint}GET / lists all paths."


def request_id_of(scope: Any) -> str:
    """Return the request id shown to the client: its own, else the server's."""
    return str(scope.get("state", {}).get("request_id", "unknown"))


def id_headers(scope: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers with the request's id: `x-request-id`, and for Anthropic's clients also `request-id`."""
    names = [REQUEST_ID]
    is_known = "headers" in scope  # otherwise the request's head was never read
    if is_known and (
        shape_of(_path_of(scope)) is ANTHROPIC_SHAPE or ANTHROPIC_VERSION in Headers(scope=scope)
    ):
        names.append(ANTHROPIC_REQUEST_ID)
    return [(name.encode(), request_id_of(scope).encode()) for name in names]


def _path_of(scope: Any) -> str:
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def own_id_of(scope: Any) -> str:
    """Return the server's unique id of this HTTP request."""
    return str(scope["state"]["own_id"])


def _headers(error: BaseException) -> dict[str, str] | None:
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, EngineDeadError):
        return {"Retry-After": "5"}
    if isinstance(error, DeadlineError):
        return {"x-should-retry": "false"}  # OpenAI's clients would retry a request that just timed out
    return {"WWW-Authenticate": "Bearer"} if getattr(error, "status", 0) == 401 else None
