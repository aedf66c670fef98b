# SPDX-License-Identifier: Apache-2.0
"""`ConsolePages`: middleware that answers a browser's requests for the console's files.

Invariant: the files are the same for everybody and hold no data, so they need no key; the script asks for one and sends
it with its requests. They load nothing from elsewhere, and their policy makes browsers refuse scripts, styles and HTML
that are not of these files. Any other request is passed on untouched.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

ASSETS = Path(__file__).parent / "assets"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no string ever becomes HTML
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # checked with its etag, so that a new version of the server is shown at once
    "vary": "accept",
}
PAGE = "/"
FILES = {
    PAGE: ("console.html", "text/html"),
    "/console/console.js": ("console.js", "text/javascript"),
    "/console/console.css": ("console.css", "text/css"),
}  # Path -> file in `assets` and media type.


class ConsolePages:
    """Answers GET for the console's files; `/` only to browsers, which accept text/html.

    Args:
        root_path: prefix that a proxy may leave in the path.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path
        self._files = {path: _response_parts(name, kind) for path, (name, kind) in FILES.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._asked_file(scope)
        if path is None:
            await self._app(scope, receive, send)
            return
        body, headers = self._files[path]
        is_known = Headers(scope=scope).get("if-none-match") == headers["etag"]
        response = Response(b"" if is_known else body, 304 if is_known else 200, headers)
        await response(scope, receive, send)

    def _asked_file(self, scope: Scope) -> str | None:
        """Return the path of the file that the request asks for; None if it is for others."""
        if scope["type"] != "http" or scope["method"] != "GET":
            return None
        path: str = scope["path"].removeprefix(self._root_path) or PAGE
        if path == PAGE and "text/html" not in Headers(scope=scope).get("accept", ""):
            return None
        return path if path in self._files else None


def _response_parts(name: str, media_type: str) -> tuple[bytes, dict[str, str]]:
    """Return a file's bytes and headers."""
    body = (ASSETS / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return body, {**HEADERS, "content-type": f"{media_type}; charset=utf-8", "etag": etag}
