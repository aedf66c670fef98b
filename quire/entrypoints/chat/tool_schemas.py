"""The tools of a request, checked: what the server and `LLM.chat` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.entrypoints.chat.formats.events import Tools
from quire.errors import ValidationError


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Name -> schema of the arguments, of tools as OpenAI describes them.

    Raises:
        ValidationError: one is no function with a name, two have one name, or the arguments of one are no object.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where, function = f"tools.{index}.function", tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValidationError(f"{where} must be an object with a name", param=where)
        if name in schemas:
            raise ValidationError(f"{where}.name {name!r:.80} is another tool's, too", param=f"{where}.name")
        schemas[name] = _schema(function.get("parameters"), f"{where}.parameters")
    return schemas


def _schema(schema: Any, where: str) -> Mapping[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValidationError(f"{where} must be the JSON schema of an object", param=where)
    return schema
