"""Streams in the document: the schema of a stream's media type is that of one event, or of one line, of it.

OpenAPI 3.1 has no word for a sequence of items; this is how its tools read the schema of `text/event-stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """Args:
    media_type: of the response.
    item: type of what is sent again and again.
    write: the schema of one event, from those of `item` and of the API's errors.
    """

    media_type: str
    item: Any
    write: Callable[[Schema, Schema], Schema]


def data_events(item: Any) -> Stream:
    """OpenAI's: events without names; an error may be the last but one, and the last is `[DONE]`."""
    return Stream("text/event-stream", item, _data_event)


def named_events(item: Any) -> Stream:
    """Events whose name is the `type` in their JSON; an error is an event of the name `error`."""
    return Stream("text/event-stream", item, _named_event)


def json_lines(item: Any) -> Stream:
    """Ollama's: a line of JSON each; an error may be the last one."""
    return Stream("application/x-ndjson", item, _line)


def _data_event(item: Schema, error: Schema) -> Schema:
    data = {"anyOf": [{"type": "string", "const": "[DONE]"}, _json_text({"anyOf": [item, error]})]}
    return _event("One event; `[DONE]` is the last, also after an error.", {"data": data})


def _named_event(item: Schema, error: Schema) -> Schema:
    fields = {"event": {"type": "string"}, "data": _json_text({"anyOf": [item, error]})}
    return _event("One event; `event` is the `type` in `data`.", fields)


def _line(item: Schema, error: Schema) -> Schema:
    return {"description": "One line.", "anyOf": [item, error]}


def _event(description: str, fields: Schema) -> Schema:
    return {"description": description, "type": "object", "properties": fields, "required": list(fields)}


def _json_text(schema: Schema) -> Schema:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
