"""From a Python function to the tool that a model is shown: schema from the signature, words from the docstring."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from quire.errors import ConfigError

SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SECTION = re.compile(
    r"^(?:args|arguments|parameters|returns?|raises|yields|examples?|notes?):\s*$", re.IGNORECASE
)
ARGUMENT = re.compile(r"^(?P<name>\*{0,2}\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.*)$")
Schema = dict[str, Any]


def tool_of(function: Callable[..., Any]) -> Schema:
    """A function as the API wants it among the `tools`.

    Raises:
        ConfigError: an argument can only be given by position, or has a type that JSON has not.
    """
    about, arguments = _words(inspect.getdoc(function) or "")
    parameters = _parameters(function, arguments)
    described = {"description": about} if about else {}
    return {
        "type": "function",
        "function": {"name": function.__name__, **described, "parameters": parameters},
    }


def _parameters(function: Callable[..., Any], words: Mapping[str, str]) -> Schema:
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"--tool {name}: its annotations name something that is not there: {error}"
        ) from None
    properties: Schema = {}
    required: list[str] = []
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(f"--tool {name}: its argument {key} can only be given by position")
        properties[key] = _of_type(hints.get(key, Any), f"--tool {name}: its argument {key}")
        if key in words:
            properties[key].setdefault("description", words[key])
        if parameter.default is parameter.empty:
            required.append(key)
    return schema


def _of_type(hint: Any, where: str) -> Schema:
    """The JSON schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if hint is None:
        return {"type": "null"}
    if origin is typing.Annotated:
        described = next((word for word in inner[1:] if isinstance(word, str)), None)
        return {**_of_type(inner[0], where), **({"description": described} if described else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(option, where) for option in inner]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    return _of_container(origin or hint, inner, where)


def _of_container(origin: Any, inner: Sequence[Any], where: str) -> Schema:
    if origin in (list, tuple, set, frozenset, Sequence):
        items = [one for one in inner[:1] if one is not Ellipsis]
        return {"type": "array", **({"items": _of_type(items[0], where)} if items else {})}
    if origin in (dict, Mapping):
        values = {"additionalProperties": _of_type(inner[1], where)} if len(inner) == 2 else {}
        return {"type": "object", **values}
    raise ConfigError(f"{where} has a type that JSON has not: {origin!r:.80}")


def _words(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, up to its first section, and of each argument."""
    about: list[str] = []
    arguments: dict[str, str] = {}
    section, last = "", ""
    for line in doc.splitlines():
        if SECTION.match(line):
            section, last = line.strip().rstrip(":").lower(), ""
        elif not section:
            about.append(line)
        elif section.startswith(("arg", "param")) and (text := line.strip()):
            found = ARGUMENT.match(text)
            if found is not None:
                last, arguments[found["name"]] = found["name"], found["text"]
            elif last:
                arguments[last] += f" {text}"
    return "\n".join(about).strip(), arguments
