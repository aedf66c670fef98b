"""Reads a request body as JSON, strictly.

Invariant: what comes out is a JSON object of finite numbers and valid Unicode, without repeated keys, not deeper than
`MAX_DEPTH` and of at most `MAX_VALUES` values; so no later code meets NaN, a lone surrogate or a recursion limit. A
body of more than `THREAD_ABOVE_BYTES` is parsed and checked in a thread, and the limits bound what holds the
interpreter at one go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from quire.entrypoints.openai.middleware.body_budget import held_body
from quire.errors import UnsupportedMediaTypeError, ValidationError

P = ParamSpec("P")
T = TypeVar("T")

MAX_DEPTH = 64
MAX_INT_DIGITS = 300  # less than a double can hold, so that an integer always fits one
MAX_VALUES = 2**20
"""Of all kinds. A text counts once, however long it is."""
MAX_CONTAINERS = 2**17
"""Lists and objects among them: the parser makes empty ones in one go, without a pause for other threads."""
MAX_MEMBERS = 2**16
"""Names in all objects, which cost more than items of lists: a prompt may be a million ids."""
THREAD_ABOVE_BYTES = 64 * 2**10
_NUM_BYTES = "num_body_bytes"
UNDECLARED = ("", "text/plain", "application/octet-stream", "application/x-www-form-urlencoded")
"""What clients say of a body of which they were told nothing: aiohttp the second and third, curl the last."""
OF_BROWSERS = ("origin", "sec-fetch-site")
"""Headers that every browser sends with what a page makes it send to another site."""


async def read_body(request: Request) -> bytes:
    """Receive the body of `request`, which is declared as JSON; the request keeps no copy of it.

    Raises:
        UnsupportedMediaTypeError: it is declared as something else.
        PayloadTooLargeError, UnavailableError: it is too large, or all bodies are.
    """
    _check_media_type(request.headers)
    body = b"".join([piece async for piece in request.stream()])
    request.scope["state"][_NUM_BYTES] = len(body)
    return body


async def read_json(request: Request) -> dict[str, Any]:
    """Receive and parse the body of `request`.

    Raises:
        ClientError: as `read_body` and `parse_json`.
    """
    body = await read_body(request)
    try:
        return await beside_loop(request, parse_json, body)
    finally:
        held_body(request.scope).release()


async def beside_loop(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what goes over a body that was read: in a thread if it is large, so that the event loop does not wait."""
    if request.scope["state"][_NUM_BYTES] > THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def _check_media_type(headers: Headers) -> None:
    """A page of another site can make a browser send a body undeclared, but not one that is declared as JSON."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json":
        return
    if media_type not in UNDECLARED or any(name in headers for name in OF_BROWSERS):
        raise UnsupportedMediaTypeError("the body must be sent with Content-Type: application/json")


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse one JSON object under the rules above."""
    _check_size(body)
    try:
        value = _DECODER.decode(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValidationError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValidationError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ValidationError("the body must be a JSON object")
    _check_contents(value)
    return value


def _check_size(body: bytes) -> None:
    """Count what stands between the texts, before anything is made of it; each step goes over the body at C's speed."""
    if len(body) <= 2 * MAX_MEMBERS:  # fewer than so many of any kind take
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MAX_VALUES + 2:
        raise _too_many("values", MAX_VALUES)
    outside = b"".join(unescaped.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > MAX_CONTAINERS:
        raise _too_many("lists and objects", MAX_CONTAINERS)
    if outside.count(b":") > MAX_MEMBERS:
        raise _too_many("members of objects", MAX_MEMBERS)
    if outside.count(b",") + num_containers > MAX_VALUES:
        raise _too_many("values", MAX_VALUES)


def _too_many(what: str, limit: int) -> ValidationError:
    return ValidationError(f"the body holds more than {limit} {what}")


def _check_contents(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _containers_in(outer)]
        if not level:
            return
    raise _too_deep()


def _containers_in(outer: Any) -> list[Any]:
    items = outer
    if isinstance(outer, dict):
        for key in outer:
            _check_text(key)
        items = outer.values()
    containers = []
    for item in items:
        kind = type(item)
        if kind is str:
            _check_text(item)
        elif kind is dict or kind is list:
            containers.append(item)
    return containers


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValidationError("the body holds a \\u escape that is half of a surrogate pair") from None


def _too_deep() -> ValidationError:
    return ValidationError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise ValidationError(f"the body holds {name}, which is no JSON number")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise ValidationError(
            f"the body holds an integer of {len(digits)} digits, the limit is {MAX_INT_DIGITS}"
        )
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValidationError("the body holds an object with a repeated key")
    return unique


def _parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValidationError("the body holds a number beyond the range of a double")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse_constant,
    parse_int=_parse_int,
    parse_float=_parse_float,
)
