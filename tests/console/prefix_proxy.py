# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy that offers a server below a prefix, which it removes, as nginx and Caddy do."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def prefix_proxy(port: int, prefix: str) -> Iterator[str]:
    """Yield the URL below which the server at this port is found."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            upstream.request(self.command, self.path.removeprefix(prefix), body or None, headers)
            with contextlib.closing(upstream), contextlib.suppress(OSError):  # the browser has gone
                self._answer(upstream.getresponse())

        do_POST = do_GET  # noqa: N815

        def _answer(self, reply: http.client.HTTPResponse) -> None:
            self.send_response_only(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while data := reply.read1(1 << 16):
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
