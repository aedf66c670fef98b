"""Decodes gzip bodies, and refuses bodies of which it is not certain where they end or how they are encoded.

Invariant: at most `CHUNK_BYTES` are decoded at a time, before the layer that limits a body's size has counted what came
before; so a body that grows without end costs no more than one that is sent in full.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.errors import ClientError, PayloadTooLargeError, UnsupportedMediaTypeError, ValidationError

CHUNK_BYTES = 64 * 2**10
GZIP_FORMAT = 16 + zlib.MAX_WBITS


class BodyEncoding:
    """Stands before `BodyLimit`, which counts decoded bytes.

    Args:
        max_bytes: also the most encoded bytes of a body, which may be decoded to nothing.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = _refusal(headers)
        if error is not None:
            response = response_of(error, request_id_of(scope))
            response.headers["connection"] = "close"  # the rest of the bytes may be anything
            await response(scope, receive, send)
        elif headers.get("content-encoding", "identity").lower() == "gzip":
            await self._app(scope, Gunzip(receive, self._max_bytes).receive, send)
        else:
            await self._app(scope, receive, send)


class Gunzip:
    """A `receive` that decodes what another one gives."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._decoder = zlib.decompressobj(GZIP_FORMAT)
        self._num_encoded = 0
        self._pending = b""
        self._has_ended = False

    async def receive(self) -> Message:
        """The next message, with at most `CHUNK_BYTES` of the decoded body.

        Raises:
            ValidationError: the body is no gzip, or not all of one.
            PayloadTooLargeError: it is longer than the limit even before it is decoded.
        """
        if not self._pending:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._count(len(message.get("body", b"")))
            self._pending, self._has_ended = message.get("body", b""), not message.get("more_body", False)
        await asyncio.sleep(0)  # a body that is here already must not keep others from their turn
        body = self._decoded()
        more = bool(self._pending) or not self._has_ended
        if not more and not self._decoder.eof:
            raise ValidationError("the gzip body ends too early")
        return {"type": "http.request", "body": body, "more_body": more}

    def _decoded(self) -> bytes:
        try:
            decoded = self._decoder.decompress(self._pending, CHUNK_BYTES)
        except zlib.error:
            raise ValidationError("the body is not valid gzip") from None
        if self._decoder.unused_data:
            raise ValidationError("the gzip body has bytes behind its end")
        self._pending = self._decoder.unconsumed_tail
        return decoded

    def _count(self, num_bytes: int) -> None:
        self._num_encoded += num_bytes
        if self._num_encoded > self._max_bytes:
            raise PayloadTooLargeError(
                f"the body is larger than {self._max_bytes} bytes (--max-request-bytes)"
            )


def _refusal(headers: Headers) -> ClientError | None:
    if headers.get("content-encoding", "identity").lower() not in ("identity", "gzip"):
        return UnsupportedMediaTypeError("the body must be sent plain or with Content-Encoding: gzip")
    return None
