"""Decodes gzip bodies, and refuses bodies of which it is not certain where they end or how they are encoded.

Invariant: at most `LATER_CHUNK_BYTES` are decoded at a time, before the layer that limits a body's size has counted
what came before; and a body grows to `MAX_RATIO` times what was sent of it at most. So one that grows without end
costs little more than one that is sent in full. All but the first chunk is decoded in a thread.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.middleware.body_budget import BodyBudget, HeldBody, hold_body
from quire.errors import ClientError, PayloadTooLargeError, UnsupportedMediaTypeError, ValidationError

CHUNK_BYTES = 64 * 2**10  # decoded by the event loop
LATER_CHUNK_BYTES = 8 * CHUNK_BYTES  # decoded by a thread, at a time
MAX_RATIO = 100  # decoded to encoded bytes
FREE_BYTES = 2**20  # decoded bytes for which the ratio does not matter
_THREADS = ThreadPoolExecutor(2, "quire-gunzip")
GZIP_FORMAT = 16 + zlib.MAX_WBITS


class BodyEncoding:
    """Stands before `BodyLimit`, which counts decoded bytes.

    Args:
        max_bytes: also the most encoded bytes of a body, which may be decoded to nothing.
        budget: for all bodies of the process.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, budget: BodyBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = _refusal(headers)
        if error is not None:
            response = response_of(error, request_id_of(scope))
            response.headers["connection"] = "close"  # the rest of the bytes may be anything
            await response(scope, receive, send)
            return
        with hold_body(scope, self._budget) as held:
            if headers.get("content-encoding", "identity").lower() == "gzip":
                receive = Gunzip(receive, self._max_bytes, held).receive
            await self._app(scope, receive, send)


class Gunzip:
    """A `receive` that decodes what another one gives; what waits to be decoded counts as held, too."""

    def __init__(self, receive: Receive, max_bytes: int, held: HeldBody) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._decoder = zlib.decompressobj(GZIP_FORMAT)
        self._held = held
        self._num_encoded = self._num_decoded = 0
        self._pending = b""
        self._has_ended = False

    async def receive(self) -> Message:
        """The next message, with at most `LATER_CHUNK_BYTES` of the decoded body.

        Raises:
            ValidationError: the body is no gzip, or not all of one.
            PayloadTooLargeError: it is longer than the limit even before it is decoded, or grows too much.
            UnavailableError: the process holds too many bytes of bodies.
        """
        if not self._pending:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._count(len(message.get("body", b"")))
            self._pending, self._has_ended = message.get("body", b""), not message.get("more_body", False)
        if self._num_decoded:
            work = partial(self._decoded, LATER_CHUNK_BYTES)
            body = await asyncio.get_running_loop().run_in_executor(_THREADS, work)
        else:
            await asyncio.sleep(0)  # a body that is here already must not keep others from their turn
            body = self._decoded(CHUNK_BYTES)
        self._count_decoded(len(body))
        more = bool(self._pending) or not self._has_ended
        if not more and not self._decoder.eof:
            raise ValidationError("the gzip body ends too early")
        return {"type": "http.request", "body": body, "more_body": more}

    def _decoded(self, most_bytes: int) -> bytes:
        try:
            decoded = self._decoder.decompress(self._pending, most_bytes)
        except zlib.error:
            raise ValidationError("the body is not valid gzip") from None
        if self._decoder.unused_data:
            raise ValidationError("the gzip body has bytes behind its end")
        self._pending = self._decoder.unconsumed_tail
        return decoded

    def _count_decoded(self, num_bytes: int) -> None:
        self._num_decoded += num_bytes
        if self._num_decoded > max(FREE_BYTES, MAX_RATIO * self._num_encoded):
            raise PayloadTooLargeError(
                f"the gzip body decodes to more than {FREE_BYTES} bytes and {MAX_RATIO} times what was sent; "
                "send it plain"
            )

    def _count(self, num_bytes: int) -> None:
        self._num_encoded += num_bytes
        if self._num_encoded > self._max_bytes:
            raise PayloadTooLargeError(
                f"the body is larger than {self._max_bytes} bytes (--max-request-bytes)"
            )
        self._held.take(num_bytes)


def _refusal(headers: Headers) -> ClientError | None:
    if headers.get("content-encoding", "identity").lower() not in ("identity", "gzip"):
        return UnsupportedMediaTypeError("the body must be sent plain or with Content-Encoding: gzip")
    return None
