"""The one place that decides what an error looks like to a client.

Invariant: always OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and never the text of an
error that nobody wrote for the client: such an error gets a fixed sentence and the request's id, and its
details go to the log.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.errors import ClientError, EngineDeadError, QuireError, StartupError, UnavailableError

logger = logging.getLogger(__name__)

ENGINE_DEAD = "The engine has stopped, and the server is ending; try again later."
HTTP_ERRORS = {
    404: ("NotFoundError", "There is nothing at this path."),
    405: ("MethodNotAllowedError", "This path does not take this method."),
}


def error_body(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; `code` is the HTTP status where OpenAI has no code of its own."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: BaseException, request_id: str) -> dict[str, Any]:
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


def response_of(error: BaseException, request_id: str) -> JSONResponse:
    """The whole HTTP answer to an error."""
    return JSONResponse(body_of(error, request_id), status_code=status_of(error), headers=_headers(error))


def frame_of(error: BaseException, request_id: str) -> bytes:
    """The server-sent event that ends a stream on an error."""
    return b"data: " + json.dumps(body_of(error, request_id)).encode() + b"\n\n"


async def handle_quire_error(request: Request, error: Exception) -> Response:
    return response_of(error, request_id_of(request.scope))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    kind, sentence = HTTP_ERRORS.get(error.status_code, ("BadRequestError", "The request cannot be handled."))
    body = error_body(sentence, kind, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def request_id_of(scope: Any) -> str:
    """The id that the server gave this HTTP request."""
    return str(scope.get("state", {}).get("request_id", "unknown"))


def _headers(error: BaseException) -> dict[str, str] | None:
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, EngineDeadError):
        return {"Retry-After": "5"}
    return {"WWW-Authenticate": "Bearer"} if getattr(error, "status", 0) == 401 else None
