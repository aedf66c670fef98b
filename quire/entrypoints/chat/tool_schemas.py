"""The tools of a request, checked: what the server and `LLM.chat` share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from quire.entrypoints.chat.formats.choice import AnswerFormat
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.errors import ValidationError

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What every format can hold."""


MAY_BE_NULL = ("properties", "required", "type")


def tool_schemas(tools: Sequence[Mapping[str, Any]], places: Sequence[str] = ()) -> Tools:
    """Return name -> schema of the arguments, of tools as OpenAI describes them.

    Args:
        places: the path of each tool's function for errors, if it is not its number in `tools`.

    Raises:
        ValidationError: one is no function with a name, two have one name, or the schema of a strict one is none of an
            object. Of other functions a schema that cannot be read says nothing: the model is shown it as it is.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = places[index] if places else f"tools.{index}.function"
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValidationError(f"{where} must be an object with a name", param=where)
        if name in schemas:
            raise ValidationError(f"{where}.name {name!r:.80} is another tool's, too", param=f"{where}.name")
        schemas[name] = _schema(function, f"{where}.parameters")
    return schemas


def check_names(tools: Iterable[str], tool_format: ToolFormat, places: Sequence[str] = ()) -> None:
    """Refuse names that a model cannot write in its format, since these tools could never be called.

    Args:
        places: as those of `tool_schemas`.

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
    """Whether a call that is written is read as the same call."""
    reader = AnswerFormat(tool_format).reader("", {name: {}})
    calls = [*reader.feed(tool_format.write([(name, {})])), *reader.finish()]
    return [call.name for call in calls if isinstance(call, ToolCall)] == [name]


def _kinds(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the types that a schema names; those of arguments may name others beside the object."""
    said = schema.get("type", "object")
    return said if isinstance(said, list) else [said]


def _schema(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise ValidationError(f"{where} must be the JSON schema of an object", param=where)
    # Programs write lists and objects without members as null.
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
