# SPDX-License-Identifier: Apache-2.0
"""Limits on request heads and bodies, and gzip decoding.

Invariant: body bytes are counted while they are read, so a body without a length, or with a false one, uses no more
memory than the limit. All bodies that are received or parsed share one budget, whose last quarter is reserved for small
bodies. gzip is decoded in chunks of `LATER_CHUNK_BYTES`, in a thread after the first one, and to at most `MAX_RATIO`
times the encoded size; bodies with other encodings are rejected.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from functools import partial
from types import TracebackType
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config import ServerConfig
from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.errors import (
    ClientError,
    HeadersTooLargeError,
    PayloadTooLargeError,
    UnavailableError,
    UnsupportedMediaTypeError,
    ValidationError,
)

SMALL_BYTES = 64 * 2**10  # largest body that may use the last quarter
TRIM_ABOVE_BYTES = 32 * 2**20  # after a peak above this, freed memory is returned to the system
RETRY_S = 2
_STATE = "held_body"

CHUNK_BYTES = 64 * 2**10  # decoded in the event loop
LATER_CHUNK_BYTES = 8 * CHUNK_BYTES  # decoded per call of a thread
MAX_RATIO = 100  # ratio of decoded to encoded bytes
FREE_BYTES = 2**20  # decoded bytes for which the ratio is not checked
GZIP_FORMAT = 16 + zlib.MAX_WBITS
AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FORM_BYTES = 2**20  # room for the fields of a form beside its sound
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 2**10


class BodyBytes(NamedTuple):
    """Most bytes of a body, and the option that says so."""

    most: int
    flag: str = "--max-request-bytes"

    def too_large(self) -> PayloadTooLargeError:
        """Return the error of a larger body."""
        return PayloadTooLargeError(f"the body is larger than {self.most} bytes ({self.flag})")


class BodySizes:
    """Limits of bodies by path: sounds may be larger than what is parsed in memory."""

    def __init__(self, config: ServerConfig) -> None:
        self._plain = BodyBytes(config.max_request_bytes)
        audio = BodyBytes(config.max_audio_bytes + FORM_BYTES, "--max-audio-bytes")
        larger = max(self._plain, audio)
        self._by_path = {config.root_path + path: larger for path in AUDIO_PATHS}

    def of(self, scope: Scope) -> BodyBytes:
        """Return the limit of a request's body."""
        return self._by_path.get(scope["path"], self._plain)


class BodyBudget:
    """Byte budget of all bodies: `max_bytes` in total, three quarters of it for bodies above `SMALL_BYTES`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._peak_bytes = 0
        self.held_bytes = 0

    def take(self, num_bytes: int, *, is_small: bool) -> None:
        """Count received bytes.

        Raises:
            UnavailableError: the budget is exceeded; these bytes are not counted.
        """
        most = self._max_bytes if is_small else self._max_bytes * 3 // 4
        if self.held_bytes + num_bytes > most:
            raise UnavailableError(
                f"request bodies in progress hold {self.held_bytes} of {self._max_bytes} bytes "
                "(--max-receiving-bytes); try again later",
                retry_after=RETRY_S,
            )
        self.held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def release_bytes(self, num_bytes: int) -> None:
        """Release bytes."""
        self.held_bytes -= num_bytes
        if self._peak_bytes > TRIM_ABOVE_BYTES and self.held_bytes < self._peak_bytes // 4:
            self._peak_bytes = self.held_bytes
            asyncio.get_running_loop().run_in_executor(None, _trim)


class HeldBody:
    """Budget share of one body, released on exit."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count received bytes.

        Raises:
            UnavailableError: the budget is exceeded.
        """
        self._budget.take(num_bytes, is_small=self._num_bytes + num_bytes <= SMALL_BYTES)
        self._num_bytes += num_bytes

    def release_bytes(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._budget.release_bytes(num_bytes)

    def release(self) -> None:
        """Release all bytes; idempotent."""
        self.release_bytes(self._num_bytes)

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_body(scope: Scope, budget: BodyBudget) -> HeldBody:
    """Open the account of a request's body, and store it in the request's state."""
    held = scope.setdefault("state", {})[_STATE] = HeldBody(budget)
    return held


def held_body(scope: Scope) -> HeldBody:
    """Return the account of a request's body."""
    held: HeldBody = scope["state"][_STATE]
    return held


def _trim() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_THREADS = ThreadPoolExecutor(2, "quire-gunzip")


class BodyEncoding:
    """Decodes gzip bodies before `BodyLimit`, which counts decoded bytes.

    Args:
        sizes: limits that also apply to the encoded bytes.
        budget: of all bodies of the process.
    """

    def __init__(self, app: ASGIApp, sizes: BodySizes, budget: BodyBudget) -> None:
        self._app = app
        self._sizes = sizes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        error = _refusal(headers)
        if error is not None:
            response = response_of(error, request_id_of(scope))
            response.headers["connection"] = "close"  # the remaining bytes cannot be trusted
            await response(scope, receive, send)
            return
        with hold_body(scope, self._budget) as held:
            if headers.get("content-encoding", "identity").lower() == "gzip":
                receive = Gunzip(receive, self._sizes.of(scope), held).receive
            await self._app(scope, receive, send)


class Gunzip:
    """`receive` wrapper that decodes gzip; encoded bytes that wait for decoding count as held."""

    def __init__(self, receive: Receive, limit: BodyBytes, held: HeldBody) -> None:
        self._receive = receive
        self._limit = limit
        self._decoder = zlib.decompressobj(GZIP_FORMAT)
        self._held = held
        self._num_encoded = self._num_decoded = 0
        self._pending = b""
        self._has_ended = False

    async def receive(self) -> Message:
        """Return the next message, with at most `LATER_CHUNK_BYTES` of the decoded body.

        Raises:
            ValidationError: the body is not valid gzip, or incomplete.
            PayloadTooLargeError: its encoded size exceeds the limit, or it expands too much.
            UnavailableError: the budget of all bodies is exceeded.
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
            await asyncio.sleep(0)  # let other tasks run even if the whole body has arrived
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
        if self._num_encoded > self._limit.most:
            raise self._limit.too_large()
        self._held.take(num_bytes)


def _refusal(headers: Headers) -> ClientError | None:
    if headers.get("content-encoding", "identity").lower() not in ("identity", "gzip"):
        return UnsupportedMediaTypeError("the body must be sent plain or with Content-Encoding: gzip")
    return None


class HeaderLimit:
    """Rejects too many or too large headers. The HTTP server's own limit is larger for heads that arrive in
    one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= MAX_HEADERS and num_bytes <= MAX_HEADER_BYTES:
            await self._app(scope, receive, send)
            return
        error = HeadersTooLargeError(
            f"the request has {len(headers)} headers of {num_bytes} bytes; {MAX_HEADERS} and {MAX_HEADER_BYTES} are "
            "allowed"
        )
        await response_of(error, request_id_of(scope))(scope, receive, send)


class BodyLimit:
    """Rejects bodies beyond their limit, by the declared length or while they arrive."""

    def __init__(self, app: ASGIApp, sizes: BodySizes) -> None:
        self._app = app
        self._sizes = sizes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit, declared = self._sizes.of(scope), Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit.most:
            await response_of(limit.too_large(), request_id_of(scope))(scope, receive, send)
            return
        num_bytes, held = 0, held_body(scope)

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit.most:
                raise limit.too_large()
            held.take(len(message.get("body", b"")))
            return message

        await self._app(scope, counted, send)
