# SPDX-License-Identifier: Apache-2.0
"""Probes, version, and the front page (GET /: JSON for programs, HTML for browsers).

Invariant: a probe never calls the engine core, so it answers while the core loads or computes. The page loads nothing
external: no script, style sheet, font or image.
"""

from __future__ import annotations

from html import escape

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.openapi.pages import HTML, document_of, page
from quire.entrypoints.openai.protocol.responses import Version
from quire.entrypoints.openai.state import server_of
from quire.errors import EngineDeadError, UnavailableError

router = APIRouter()
BODY = """\
<h1>quire {version}</h1>
<p>An inference server for large language models: {status}.</p>
<h2>Models</h2>
<ul>{models}</ul>
<h2>Endpoints</h2>
{docs}<ul>{endpoints}</ul>"""


class FrontPage(msgspec.Struct):
    """Server description; `status` is "ready" or why requests are rejected; `docs` is null if disabled."""

    name: str
    version: str
    status: str
    models: list[str]
    docs: str | None
    endpoints: list[str]


@router.get("/")
@describe(Operation(reply=FrontPage, other=HTML))
async def front_page(request: Request) -> Response:
    """Name, version, models, state and endpoints."""
    facts = _facts(request)
    if "text/html" in request.headers.get("accept", ""):
        return page("quire", _body(facts))
    return json_response(facts)


def _facts(request: Request) -> FrontPage:
    server = server_of(request)
    operations = document_of(request)["paths"].items()
    return FrontPage(
        name="quire",
        version=__version__,
        status=server.unavailable or "ready",
        models=list(server.model_names),
        docs=None if server.config.disable_fastapi_docs else "/docs",
        endpoints=[f"{method.upper()} {path}" for path, methods in operations for method in methods],
    )


def _body(facts: FrontPage) -> str:
    docs = ""
    if facts.docs:
        docs = f'<p>Described in <a href="{facts.docs.lstrip("/")}">{facts.docs}</a>.</p>\n'
    return BODY.format(
        version=escape(facts.version),
        status=escape(facts.status),
        models=_items(facts.models),
        docs=docs,
        endpoints=_items(facts.endpoints),
    )


def _items(texts: list[str]) -> str:
    return "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)


@router.get("/health")
@router.get("/readyz")
@router.api_route("/ping", methods=["GET", "POST"])
@describe(Operation())
async def ready(request: Request) -> Response:
    """200 if a request should come here now; 503 while a core loads (with its stage and what is left) or does not
    answer, when the queue is nearly full, when draining and at the end."""
    server = server_of(request)
    reason = server.unavailable or server.engine.crowding()
    if reason is not None:
        raise UnavailableError(reason, retry_after=server.retry_after)
    return Response()


@router.get("/livez")
@describe(Operation())
async def live(request: Request) -> Response:
    """200 while loading, computing (however long) and draining; 503 while the engine core stands still, and at the
    end."""
    engine = server_of(request).engine
    if engine.errored:
        raise EngineDeadError("the engine has stopped")
    if engine.stalls:
        raise UnavailableError("the engine core does not answer; it is restarted if it stays unresponsive")
    return Response()


@router.get("/version")
@describe(Operation(reply=Version))
async def version() -> Response:
    """Return the version of quire."""
    return json_response(Version(__version__))
