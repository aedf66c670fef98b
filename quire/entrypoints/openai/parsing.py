"""From an HTTP request to a checked request model.

Invariant: every route with a body reads it here, so the rules about types and unknown fields are the same for all.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from quire.entrypoints.openai.field_policy import INNER, settle_fields
from quire.entrypoints.openai.json_body import beside_loop, read_json
from quire.entrypoints.openai.notes import Notes
from quire.entrypoints.openai.protocol.requests import ChatFields, RequestModel
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tool_kinds import settle_tools
from quire.errors import ValidationError

Model = TypeVar("Model", bound=RequestModel)


async def read_request(request: Request, model: type[Model]) -> Model:
    """Read the body of `request` as `model`; the notes on it are left in the request's state, too.

    Raises:
        ClientError: the body is no JSON object, a field is unknown or of the wrong type, or the model is an adapter
            that cannot be used.
    """
    body = await checked(request, await read_json(request), model)
    await server_of(request).find_adapter(getattr(body, "model", None))
    return body


async def checked(request: Request, body: dict[str, Any], model: type[Model]) -> Model:
    """The part of `read_request` after the body is JSON; of a large body it runs in a thread."""
    return await beside_loop(request, _checked, request, body, model)


def _checked(request: Request, body: dict[str, Any], model: type[Model]) -> Model:
    server = server_of(request)
    known = model.model_fields.keys() - server.idle_fields
    # A request that is made from another one adds to the notes on that.
    reject = server.config.unknown_fields == "reject"
    notes: Notes = request.scope["state"].setdefault("notes", Notes(reject=reject))
    inner = INNER if model.inner is None else model.inner
    kept = settle_fields(body, known, notes, inner, samples=model.samples)
    try:
        read = model.model_validate(kept).with_notes(notes)
    except pydantic.ValidationError as error:
        raise _translated(error) from None
    if isinstance(read, ChatFields):
        settle_tools(read)
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
    """The longest path that all errors share; alternatives of one field differ only in their last steps."""
    if len(details) == 1:
        return list(details[0]["loc"])
    shared = []
    for steps in zip(*(detail["loc"] for detail in details), strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return shared
