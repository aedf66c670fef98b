# SPDX-License-Identifier: Apache-2.0
"""Validation of a request's tools, shared by the server and `LLM.chat`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.scanning import ToolCall, Tools
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.errors import ValidationError

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # Names that every format can express.

MAY_BE_NULL = ("properties", "required", "type")


def tool_schemas(tools: Sequence[Mapping[str, Any]], places: Sequence[str] = ()) -> Tools:
    """Return name -> schema of the arguments, for tools in OpenAI's form.

    Args:
        places: path of each tool's function for errors, if it is not its index in `tools`.

    Raises:
        ValidationError: a tool is not a function with a name, a name is repeated, or the schema of a strict tool is not
            of an object. An invalid schema of another tool counts as empty; the model still sees it.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = places[index] if places else f"tools.{index}.function"
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValidationError(f"{where} must be an object with a name", param=where)
        if name in schemas:
            raise ValidationError(
                f"{where}.name {name!r:.80} is already used by another tool", param=f"{where}.name"
            )
        schemas[name] = _schema(function, f"{where}.parameters")
    return schemas


def check_names(tools: Iterable[str], tool_format: ToolFormat, places: Sequence[str] = ()) -> None:
    """Reject names that the model's format cannot express, since these tools could never be called.

    Args:
        places: as in `tool_schemas`.

    Raises:
        ValidationError: names the first such tool.
    """
    for index, name in enumerate(tools):
        if not PLAIN_NAME.fullmatch(name) and not _carries(tool_format, name):
            where = f"{places[index] if places else f'tools.{index}.function'}.name"
            raise ValidationError(
                f"{where} {name!r:.80} has characters that a call in the format {tool_format.name} cannot hold",
                param=where,
            )


@lru_cache(maxsize=1024)
def _carries(tool_format: ToolFormat, name: str) -> bool:
    """Return whether a written call with this name is parsed back identically."""
    reader = AnswerFormat(tool_format).reader("", {name: {}})
    calls = [*reader.feed(tool_format.write([(name, {})])), *reader.finish()]
    return [call.name for call in calls if isinstance(call, ToolCall)] == [name]


def _kinds(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the types that a schema names; for arguments there may be others besides object."""
    said = schema.get("type", "object")
    return said if isinstance(said, list) else [said]


def _schema(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise ValidationError(f"{where} must be the JSON schema of an object", param=where)
    # Some clients send empty lists and objects as null.
    schema = {key: value for key, value in schema.items() if value is not None or key not in MAY_BE_NULL}
    try:
        return _checked(schema, where)
    except ValidationError:
        if function.get("strict") is True:
            raise
        return {}


def _checked(schema: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if "object" not in _kinds(schema):
        raise ValidationError(f"{where} must be the JSON schema of an object", param=where)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValidationError(f"{where}.properties must be an object", param=f"{where}.properties")
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            place = f"{where}.properties.{name:.80}"
            raise ValidationError(f"{place} must be a JSON schema", param=place)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValidationError(f"{where}.required must be a list of names", param=f"{where}.required")
    return schema
