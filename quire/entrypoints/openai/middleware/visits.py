"""Whoever is let in is in flight until its answer is complete, whatever it is doing: sending its body, waiting for its
prompt's tokens, generating.

Invariant: a request that the server gives up before its answer began is answered 503, and never cut.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.in_flight import InFlight, given_up


class Visits:
    """Counts work; what only asks is answered in no time."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._in_flight.visit() as visit:

            async def send_seen(message: Message) -> None:
                visit.has_begun = True
                await send(message)

            try:
                await self._app(scope, receive, send_seen)
            except asyncio.CancelledError:
                if not visit.is_cancelled or visit.has_begun:
                    raise
                visit.task.uncancel()
                await response_of(given_up(), request_id_of(scope))(scope, receive, send)
