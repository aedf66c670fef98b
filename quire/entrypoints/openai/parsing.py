# SPDX-License-Identifier: Apache-2.0
"""Request parsing: HTTP body -> JSON -> field policy -> checked model. Every route with a body uses it.

Invariant: the JSON is an object of finite numbers and valid Unicode, without repeated keys, within `MAX_DEPTH` and
`MAX_VALUES`, so later code meets no NaN, lone surrogate or recursion limit. Bodies above `THREAD_ABOVE_BYTES` are
parsed in a thread.
No field is dropped silently. A field that would change the answer and is not supported is rejected unless its value is
neutral. Any other field is accepted and named in the reply, or rejected with `--unknown-fields reject`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import pydantic
from starlette.datastructures import Headers
from starlette.requests import Request

from quire.entrypoints.openai.field_rules import INNER, FieldRules, RejectedField, refusals
from quire.entrypoints.openai.middleware.body_limit import held_body
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.protocol.requests import ChatFields, RequestModel
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tool_choice import resolve_tools
from quire.errors import UnsupportedMediaTypeError, ValidationError

P = ParamSpec("P")
T = TypeVar("T")
MAX_DEPTH = 64
MAX_INT_DIGITS = 300  # fewer than a double's, so that every integer fits one
MAX_VALUES = 2**20  # Values of all kinds; a text counts once.
MAX_CONTAINERS = 2**17  # Lists and objects: the parser makes empty ones without yielding to other threads.
# Object members, which cost more than list items (a prompt may have a million token ids).
MAX_MEMBERS = 2**16
THREAD_ABOVE_BYTES = 64 * 2**10
_NUM_BYTES = "num_body_bytes"
# Default media types of clients: aiohttp sends the second and third, curl the last.
UNDECLARED = ("", "text/plain", "application/octet-stream", "application/x-www-form-urlencoded")
OF_BROWSERS = ("origin", "sec-fetch-site")  # Headers that every browser adds to a cross-site request.
Model = TypeVar("Model", bound=RequestModel)


def filter_fields(
    body: Mapping[str, Any],
    honored: Iterable[str],
    notes: RequestNotes,
    inner: Mapping[str, FieldRules] = INNER,
    *,
    samples: bool = True,
) -> dict[str, Any]:
    """Return the supported fields of a request body, at any depth; names of others go to `notes`.

    A null is the same as an absent field, as in OpenAI's own clients.

    Args:
        inner: rules of objects in the request.
        samples: whether the request is for generated text.

    Raises:
        ValidationError: names the unsupported field.
    """
    return _filter(body, FieldRules(frozenset(honored), refusals(samples=samples), inner), notes, "")


def _filter(body: Mapping[str, Any], rules: FieldRules, notes: RequestNotes, path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None and name not in rules.empty:
            continue
        if name not in rules.honored:
            _reject_or_note(path + name, value, rules.refused.get(name), notes, rules.honored)
        elif name in rules.inner:
            kept[name] = _filter_inner(value, rules.inner[name], notes, path + name)
        else:
            kept[name] = value
    return kept


def _filter_inner(value: Any, rules: FieldRules, notes: RequestNotes, path: str) -> Any:
    """Filter an object, or each object of a list; other types are left to the model's check."""
    if isinstance(value, dict):
        return _filter(value, rules, notes, f"{path}.")
    if not isinstance(value, list):
        return value
    return [_filter(item, rules, notes, f"{path}[].") if isinstance(item, dict) else item for item in value]


def _reject_or_note(
    path: str, value: Any, rule: RejectedField | None, notes: RequestNotes, honored: Iterable[str]
) -> None:
    if rule is None:
        notes.ignore(path, honored)
    else:
        rule.check(path, value)


async def read_body(request: Request) -> bytes:
    """Receive the body of `request`, declared as JSON; the request keeps no copy.

    Raises:
        UnsupportedMediaTypeError: it is declared as another type.
        PayloadTooLargeError, UnavailableError: a size limit is exceeded.
    """
    _check_media_type(request.headers)
    body = b"".join([piece async for piece in request.stream()])
    note_size(request, len(body))
    return body


def note_size(request: Request, num_bytes: int) -> None:
    """Record the bytes of a body that are to be parsed and checked."""
    request.scope["state"][_NUM_BYTES] = num_bytes


async def read_json(request: Request) -> dict[str, Any]:
    """Receive and parse the body of `request`.

    Raises:
        ClientError: as `read_body` and `parse_json`.
    """
    body = await read_body(request)
    try:
        return await parse_beside_loop(request, parse_json, body)
    finally:
        held_body(request.scope).release()


async def parse_beside_loop(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work over a body, in a thread if the body is large, so that the event loop is not blocked."""
    if request.scope["state"][_NUM_BYTES] > THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def _check_media_type(headers: Headers) -> None:
    """Reject undeclared bodies from browsers: a cross-site page cannot declare JSON without a CORS preflight."""
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
        if not body:
            raise ValidationError("the body is empty; send a JSON object") from None
        raise ValidationError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ValidationError("the body must be a JSON object")
    _check_contents(value)
    return value


def _check_size(body: bytes) -> None:
    """Count delimiters outside strings before parsing; each pass runs at C speed."""
    if len(body) <= 2 * MAX_MEMBERS:  # too short to exceed any limit
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


async def read_request(request: Request, model: type[Model]) -> Model:
    """Read the body of `request` as `model`; its notes are also kept in the request's state.

    Raises:
        ClientError: the body is not a JSON object, a field is unknown or of the wrong type, or the model is an unusable
            adapter.
    """
    body = await checked(request, await read_json(request), model)
    await server_of(request).find_adapter(getattr(body, "model", None))
    return body


async def checked(request: Request, body: dict[str, Any], model: type[Model]) -> Model:
    """Run the second half of `read_request`, on parsed JSON; large bodies are checked in a thread."""
    return await parse_beside_loop(request, _checked, request, body, model)


def _checked(request: Request, body: dict[str, Any], model: type[Model]) -> Model:
    server = server_of(request)
    known = model.model_fields.keys() - server.idle_fields
    # A translated request adds to the notes of the original.
    reject = server.config.unknown_fields == "reject"
    notes: RequestNotes = request.scope["state"].setdefault("notes", RequestNotes(reject=reject))
    inner = INNER if model.inner is None else model.inner
    kept = filter_fields(body, known, notes, inner, samples=model.samples)
    try:
        read = model.model_validate(kept).with_notes(notes)
    except pydantic.ValidationError as error:
        raise _translated(error) from None
    if isinstance(read, ChatFields):
        resolve_tools(read)
    return read


def _translated(error: pydantic.ValidationError) -> ValidationError:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    first = details[0]
    same_field = [detail for detail in details if detail["loc"][:1] == first["loc"][:1]]
    path = ".".join(str(step) for step in _common(same_field))
    if first["type"] == "missing":
        return ValidationError(f"{path} is required", param=path)
    problems = dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in same_field)
    if all(detail["msg"].startswith("Input should be ") for detail in same_field):
        return ValidationError(f"{path} must be {' or '.join(problems)}", param=path)
    return ValidationError(f"{path}: {'; '.join(problems)}", param=path)


def _common(details: list[Any]) -> list[Any]:
    """Return the longest path shared by all errors; alternatives of one field differ in their last steps only."""
    if len(details) == 1:
        return list(details[0]["loc"])
    shared = []
    for steps in zip(*(detail["loc"] for detail in details), strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return shared
