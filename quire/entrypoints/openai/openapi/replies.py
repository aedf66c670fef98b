"""JSON schemas of replies, from the structs that are sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, inspect

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
_LONG_NAME = re.compile(r"quire\.entrypoints\.(?:openai\.)?(\w+)\.(?:\w+\.)*(\w+)")


def reply_schemas(types: Iterable[Any]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """The schema of each type, and the components that they refer to.

    A field is required unless it is left out when it is UNSET: what has a default is written all the same.
    """
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for cls in _structs(inspect.multi_type_info(types)):
        long_name = f"{cls.__module__}.{cls.__qualname__}"
        _settle(components[long_name if long_name in components else cls.__name__], cls)
    schemas, components = _with_short_names(schemas, components)
    return dict(zip(types, schemas, strict=True)), components


def _settle(schema: Schema, cls: type[msgspec.Struct]) -> None:
    tag = cls.__struct_config__.tag_field
    always = [one.encode_name for one in msgspec.structs.fields(cls) if one.default is not UNSET]
    schema["required"] = [*([] if tag is None else [tag]), *always]
    del schema["title"]
    for field_schema in schema["properties"].values():
        field_schema.pop("default", None)


def _structs(nodes: Iterable[inspect.Type]) -> Iterator[type[msgspec.Struct]]:
    """Every struct in a tree of types, once."""
    seen: set[type] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, inspect.StructType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            pending += [one.type for one in node.fields]
        elif isinstance(node, inspect.UnionType):
            pending += node.types
        elif isinstance(node, inspect.CollectionType):
            pending.append(node.item_type)
        elif isinstance(node, inspect.DictType):
            pending.append(node.value_type)
        elif isinstance(node, inspect.Metadata):
            pending.append(node.type)


def _with_short_names(*values: Any) -> Any:
    """Structs of two families that share a name are called by their module, which is shortened to the family."""
    return json.loads(_LONG_NAME.sub(_short_name, json.dumps(values)))


def _short_name(found: re.Match[str]) -> str:
    family = "" if found[1] == "protocol" else found[1].capitalize()  # OpenAI's own
    return family + found[2]
