"""The layer around all that can fail: names the request and turns whatever escapes into an answer.

Invariant: every response has an `x-request-id`, the client's if it has sent a sane one, else the server's, and one for
Anthropic's client the same as `request-id`. The server has an id of its own for each request, and the client's is no
key to anything. No exception reaches the HTTP server.
"""

from __future__ import annotations

import logging
import secrets

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.client_ids import ClientIds, given_id
from quire.entrypoints.openai.errors import id_headers, response_of
from quire.entrypoints.openai.in_flight import ClientDisconnectedError
from quire.entrypoints.openai.notes import Notes
from quire.log_format import request_id as log_request_id

logger = logging.getLogger(__name__)


class Boundary:
    """Request id, the headers of a request's notes, last resort for errors."""

    def __init__(self, app: ASGIApp, client_ids: ClientIds) -> None:
        self._app = app
        self._client_ids = client_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        own_id = state["own_id"] = secrets.token_hex(12)
        request_id = state["request_id"] = given_id(Headers(scope=scope)) or own_id
        if request_id == own_id:
            await self._answer(scope, receive, send)
        else:
            with self._client_ids.used(request_id, own_id):
                await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        request_id: str = state["request_id"]
        in_log = log_request_id.set(request_id)
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                notes: Notes | None = state.get("notes")
                told = notes.headers(is_error=message["status"] >= 400) if notes else ()
                headers = [*message.get("headers", ()), *id_headers(scope), *told]
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except (ClientDisconnectedError, ClientDisconnect):
            logger.debug("request %s: the client went away", request_id)
        except (
            Exception
        ) as error:  # the boundary of the process: anything else would close the connection bare
            if has_begun:
                logger.error("request %s failed after its response began", request_id, exc_info=error)
            else:
                await response_of(error, request_id)(scope, receive, send_with_headers)
        finally:
            log_request_id.reset(in_log)
