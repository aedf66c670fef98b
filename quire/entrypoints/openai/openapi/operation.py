# SPDX-License-Identifier: Apache-2.0
"""Description of a route, beside its code.

OpenAPI 3.1 cannot describe sequences: the schema of a stream's media type is that of one event or line, as tools
expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.entrypoints.openai.protocol.requests import RequestModel

Schema = dict[str, Any]

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
ATTRIBUTE = "__quire_operation__"


@dataclass(frozen=True)
class Stream:
    """Streamed response of a route.

    Args:
        media_type: of the response.
        item: type of the streamed objects.
        write: function from the schemas of `item` and of the API's errors to the schema of one event.
    """

    media_type: str
    item: Any
    write: Callable[[Schema, Schema], Schema]


def data_events(item: Any) -> Stream:
    """Return OpenAI's stream: unnamed events; an error may come last but one, and `[DONE]` is last."""
    return Stream("text/event-stream", item, _data_event)


def events_without_end(item: Any) -> Stream:
    """Return llama-server's stream: unnamed events, the last of which has `stop` true; an error may be the last."""
    return Stream("text/event-stream", item, _plain_event)


def named_events(item: Any) -> Stream:
    """Return a stream whose event names equal the `type` in their JSON; errors are named `error`."""
    return Stream("text/event-stream", item, _named_event)


def json_lines(item: Any) -> Stream:
    """Return Ollama's stream: one JSON line each; an error may be the last one."""
    return Stream("application/x-ndjson", item, _line)


def _data_event(item: Schema, error: Schema) -> Schema:
    data = {"anyOf": [{"type": "string", "const": "[DONE]"}, _json_text({"anyOf": [item, error]})]}
    return _event("One event; `[DONE]` is the last, also after an error.", {"data": data})


def _plain_event(item: Schema, error: Schema) -> Schema:
    return _event("One event.", {"data": _json_text({"anyOf": [item, error]})})


def _named_event(item: Schema, error: Schema) -> Schema:
    fields = {"event": {"type": "string"}, "data": _json_text({"anyOf": [item, error]})}
    return _event("One event; `event` is the `type` in `data`.", fields)


def _line(item: Schema, error: Schema) -> Schema:
    return {"description": "One line.", "anyOf": [item, error]}


def _event(description: str, fields: Schema) -> Schema:
    return {"description": description, "type": "object", "properties": fields, "required": list(fields)}


def _json_text(schema: Schema) -> Schema:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


@dataclass(frozen=True)
class Operation:
    """Description of what a route accepts and returns, besides what all routes share.

    Args:
        body: alternative models of the JSON body.
        is_form: the body is multipart/form-data instead.
        reply: type of the JSON reply; None: no body.
        anthropic: type of the JSON reply to Anthropic's clients; their errors have Anthropic's form. None: the same as
            `reply`.
        stream: the stream sent if the client requests one.
        other: schemas of replies in further media types.
        errors: statuses that only some routes return.
        headers: request headers that the route reads, with their schemas.
        query: query parameters that the route reads, with their schemas.
    """

    body: tuple[type[RequestModel], ...] = ()
    is_form: bool = field(default=False, kw_only=True)
    reply: Any = None
    anthropic: Any = None
    stream: Stream | None = None
    other: Mapping[str, Schema] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    headers: Mapping[str, Schema] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)


def describe(operation: Operation) -> Callable[[Endpoint], Endpoint]:
    """Attach an operation to a route's function; used below the router's decorator."""

    def described(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)[ATTRIBUTE] = operation
        return endpoint

    return described


def operation_of(endpoint: Callable[..., Any]) -> Operation | None:
    """Return the operation attached to a route's function."""
    found = vars(endpoint).get(ATTRIBUTE)
    return found if isinstance(found, Operation) else None
