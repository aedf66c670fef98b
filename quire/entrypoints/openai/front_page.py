"""GET /: what answers here, as JSON for programs and as a page for browsers.

Invariant: the page needs nothing from elsewhere: no script, no style sheet, no font, no picture.
"""

from __future__ import annotations

from html import escape

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.openapi.pages import HTML, document_of, page
from quire.entrypoints.openai.state import server_of

router = APIRouter()
BODY = """\
<h1>quire {version}</h1>
<p>An inference server for large language models: {status}.</p>
<h2>Models</h2>
<ul>{models}</ul>
<h2>Endpoints</h2>
{docs}<ul>{endpoints}</ul>"""


class FrontPage(msgspec.Struct):
    """`status` is "ready", or why no work is taken; `docs` is null where there are none."""

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
