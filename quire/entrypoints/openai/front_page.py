"""GET /: what answers here, as JSON for programs and as a page for browsers.

Invariant: the page needs nothing from elsewhere: no script, no style sheet, no font, no picture.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from quire import __version__
from quire.entrypoints.openai.state import server_of

router = APIRouter()
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>quire</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44em; margin: 3em auto; padding: 0 1em;
        color: #222; background: #fff }}
code {{ background: #f2f2f2; padding: 0 .25em; overflow-wrap: anywhere }}
li {{ margin: .2em 0 }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #ddd; background: #181818 }} code {{ background: #2a2a2a }} a {{ color: #8bf }}
}}
</style>
</head>
<body>
<h1>quire {version}</h1>
<p>An inference server for large language models: {status}.</p>
<h2>Models</h2>
<ul>{models}</ul>
<h2>Endpoints</h2>
{docs}<ul>{endpoints}</ul>
</body>
</html>
"""


@router.get("/")
async def front_page(request: Request) -> Response:
    """Name, version, models, state and endpoints."""
    facts = _facts(request)
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_page(facts), headers=POLICY)
    return JSONResponse(facts)


def _facts(request: Request) -> dict[str, Any]:
    server, app = server_of(request), request.app
    operations = app.openapi()["paths"].items()
    return {
        "name": "quire",
        "version": __version__,
        "status": server.unavailable or "ready",
        "models": list(server.model_names),
        "docs": app.docs_url if app.openapi_url else None,
        "endpoints": [f"{method.upper()} {path}" for path, methods in operations for method in methods],
    }


def _page(facts: dict[str, Any]) -> str:
    docs = (
        f'<p>Described in <a href="{facts["docs"].lstrip("/")}">{facts["docs"]}</a>.</p>\n'
        if facts["docs"]
        else ""
    )
    return PAGE.format(
        version=escape(facts["version"]),
        status=escape(facts["status"]),
        models=_items(facts["models"]),
        docs=docs,
        endpoints=_items(facts["endpoints"]),
    )


def _items(texts: list[str]) -> str:
    return "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
