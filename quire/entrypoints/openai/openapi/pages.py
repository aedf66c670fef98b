# SPDX-License-Identifier: Apache-2.0
"""GET /openapi.json, and /docs, which shows it.

Invariant: the page loads nothing external, neither script nor style sheet: server and users may have no internet
access.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from quire.entrypoints.openai.openapi.document import Document
from quire.entrypoints.openai.openapi.limits import ServerLimits
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.state import server_of

router = APIRouter()
Schema = dict[str, Any]
JSON_OBJECT: Schema = {"type": "object"}
HTML: Schema = {"text/html": {"type": "string"}}
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50em; margin: 3em auto; padding: 0 1em;
       color: #222; background: #fff }
code, pre { background: #f2f2f2; padding: 0 .25em; overflow-wrap: anywhere; white-space: pre-wrap }
li { margin: .2em 0 }
summary { cursor: pointer; margin: .4em 0 }
table { border-collapse: collapse } td { border: 1px solid #8885; padding: .1em .5em; vertical-align: top }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } code, pre { background: #2a2a2a } a { color: #8bf }
}
"""
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def document_of(request: Request) -> Schema:
    """Return the document of the server that answers `request`; must not be modified."""
    document = request.app.state.document
    assert isinstance(document, Document)
    return document.under(ServerLimits.from_server(server_of(request)))


def page(title: str, body: str) -> HTMLResponse:
    """Return an HTML page with a policy that forbids loading anything."""
    return HTMLResponse(PAGE.format(title=escape(title), style=STYLE, body=body), headers=POLICY)


@router.get("/openapi.json")
@describe(Operation(other={"application/json": JSON_OBJECT}))
async def openapi_document(request: Request) -> Response:
    """Return this description for programs."""
    return JSONResponse(document_of(request))


@router.get("/docs")
@describe(Operation(other=HTML))
async def docs(request: Request) -> Response:
    """Return this description for people."""
    return page("quire: endpoints", "\n".join(_body(document_of(request))))


def _body(document: Schema) -> Iterator[str]:
    yield f"<h1>quire {escape(document['info']['version'])}</h1>"
    yield f"<p>{escape(document['info']['description'])} Programs read <a href='openapi.json'>openapi.json</a>.</p>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(f"{method.upper()} {path}", operation, document["components"]["responses"])
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        shown = json.dumps(schema, indent=1, ensure_ascii=False)
        yield f"<details id='{name}'><summary><code>{name}</code></summary><pre>{escape(shown)}</pre></details>"


def _operation(title: str, operation: Schema, known: Schema) -> Iterator[str]:
    yield f"<details><summary><code>{escape(title)}</code> {escape(operation['summary'])}</summary>"
    yield f"<p>{escape(operation['description'])}</p>"
    keys = [name for scheme in operation.get("security", ()) for name in scheme]
    if keys:
        yield f"<p>Needs a key: {escape(' or '.join(keys))}.</p>"
    for parameter in operation.get("parameters", ()):
        yield f"<p><code>{escape(parameter['name'])}</code> ({parameter['in']})</p>"
    if "requestBody" in operation:
        yield f"<p>Body: {_content(operation['requestBody'])}</p>"
    responses = {
        status: known[one["$ref"].rsplit("/", 1)[-1]] if "$ref" in one else one
        for status, one in operation["responses"].items()
    }
    rows = [
        f"<tr><td>{status}</td><td>{escape(one['description'])}</td><td>{_content(one)}</td></tr>"
        for status, one in responses.items()
    ]
    yield f"<table>{''.join(rows)}</table></details>"


def _content(holder: Schema) -> str:
    """Return each media type with links to its schemas."""
    return "; ".join(
        f"{escape(media_type)} {_links(described['schema'])}"
        for media_type, described in holder.get("content", {}).items()
    )


def _links(schema: Any) -> str:
    names = dict.fromkeys(_references(schema))
    return ", ".join(f"<a href='#{name}'>{name}</a>" for name in names)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rsplit("/", 1)[-1]
        for item in schema.values():
            yield from _references(item)
