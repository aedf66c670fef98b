# SPDX-License-Identifier: Apache-2.0
"""Constraints on calls: the structural-tag pieces (`quire.json_schema.structural_tag`) that syntaxes use.

Invariant: a client's text, such as a function or argument name, is matched literally and never read as a marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

Form = dict[str, Any]  # A piece of a structural tag.
Schema = Mapping[str, Any]
ANY_OBJECT: Schema = {"type": "object"}
NOTHING: Form = {"type": "const_string", "value": ""}
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
     "$defs", "definitions", "strict", "nullable"}
)  # fmt: skip  # Keywords that do not restrict a value by themselves.
OF_ARGUMENTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
MAX_REFERENCES = 16


class UnenforceableError(Exception):
    """Raised for a schema that a syntax cannot enforce; the message names the keyword, `path` its location."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: tuple[str, ...] = ()


@contextmanager
def within(*path: str) -> Iterator[None]:
    """Prefix the path of errors raised while a subschema at this location is read."""
    try:
        yield
    except UnenforceableError as error:
        error.path = (*path, *error.path)
        raise


class Argument(NamedTuple):
    """One argument of a function."""

    name: str
    schema: Schema
    is_required: bool


def fixed(text: str) -> Form:
    """Match fixed text of the format; names of special tokens in it match these tokens."""
    return {"type": "const_string", "value": text}


def verbatim(text: str) -> Form:
    """Match a client's text literally."""
    if not text:
        return NOTHING
    return matching(
        "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)
    )


def matching(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def json_of(schema: Schema) -> Form:
    return {"type": "json_schema", "json_schema": dict(schema), "origin": []}


def placed(form: Form, *path: str) -> Form:
    """Set the location of a subschema's form within the whole schema, for later errors."""
    if form["type"] == "json_schema":
        return {**form, "origin": [*path, *form["origin"]]}
    inner: Form = {}
    if "elements" in form:
        inner["elements"] = [placed(one, *path) for one in form["elements"]]
    if "element" in form:
        inner["element"] = placed(form["element"], *path)
    return {**form, **inner}


def row(*forms: Form) -> Form:
    return {"type": "sequence", "elements": list(forms)}


def either(forms: Sequence[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def fields(forms: Sequence[Form], required: Sequence[bool], separator: str = "") -> Form:
    """Match the forms in order; optional ones may be missing."""
    return {"type": "fields", "elements": list(forms), "required": list(required), "separator": separator}


def listed(element: Form, separator: str, least: int = 0, most: int | None = None) -> Form:
    return {"type": "list", "element": element, "separator": separator, "min_items": least, "max_items": most}


def until(end: str, pattern: str | None = None) -> Form:
    """Match text up to and including the first `end`; `pattern` restricts the text before it."""
    return {"type": "until", "end": end, **({} if pattern is None else {"pattern": pattern})}


def arguments_of(schema: Schema, *, strict: bool) -> list[Argument]:
    """Return the arguments that the schema names, for syntaxes that write them one by one.

    Raises:
        UnenforceableError: the schema relates arguments to each other.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise UnenforceableError("properties must be an object, and required a list")
    if not strict:
        return [Argument(name, {}, False) for name in properties]
    others = sorted(keyword for keyword in schema if keyword not in OF_ARGUMENTS)
    if others:
        raise UnenforceableError(f"the keyword {others[0]} beside the arguments")
    if isinstance(schema.get("additionalProperties"), Mapping):
        raise UnenforceableError("arguments without names (additionalProperties)")
    unnamed = [name for name in required if name not in properties]
    if unnamed:
        raise UnenforceableError(f"the argument {unnamed[0]!r:.80}, which is required and not described")
    return [_argument(name, one, schema, name in required) for name, one in properties.items()]


def _argument(name: str, described: Any, root: Schema, is_required: bool) -> Argument:
    with within("properties", name):
        return Argument(name, resolved(described, root), is_required)


def resolved(schema: Any, root: Schema) -> Schema:
    """Return a schema with references resolved at its top and at the top of its alternatives.

    Raises:
        UnenforceableError: a reference is circular, or does not lead to the root's definitions.
    """
    return _resolved(schema, root, MAX_REFERENCES)


def _resolved(schema: Any, root: Schema, left: int) -> Schema:
    if isinstance(schema, bool):
        if not schema:
            raise UnenforceableError("a schema that no value fits")
        return {}
    if not isinstance(schema, Mapping):
        raise UnenforceableError("a schema that is no object")
    if not left:
        raise UnenforceableError("references that lead too far")
    if "$ref" in schema:
        target = _definition(schema["$ref"], root)
        return _resolved(
            {**target, **{key: value for key, value in schema.items() if key != "$ref"}}, root, left - 1
        )
    found = dict(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(found.get(key), list):
            found[key] = [_resolved(option, root, left - 1) for option in found[key]]
    return found


def _definition(reference: Any, root: Schema) -> Schema:
    place, _, name = str(reference).rpartition("/")
    definitions = root.get(place.removeprefix("#/")) if place in ("#/$defs", "#/definitions") else None
    target = definitions.get(name) if isinstance(definitions, Mapping) else None
    if not isinstance(target, Mapping):
        raise UnenforceableError(f"the reference {reference!r:.80}")
    return target


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a subschema with the root's definitions."""
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
