"""A JSON schema as a client sends it, to one that the grammar library enforces as the standard means it.

Invariant: what is returned accepts a value only if the client's schema (draft 2020-12) does; whatever cannot be kept to
that is refused, with a JSON pointer to it. A keyword that the standard does not define says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from quire.errors import ValidationError
from quire.structured_output import keywords
from quire.structured_output.ecma_regex import RegexError, to_rust
from quire.structured_output.endless import Endless
from quire.structured_output.formats import AS_PATTERN
from quire.structured_output.formats import REFUSED as REFUSED_FORMATS
from quire.structured_output.params import invalid
from quire.structured_output.pointer import Path, find, path_of

MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 64
Schema = dict[str, Any]
Refusal = Callable[[Path, str], ValidationError]


def parse_json(name: str, text: str) -> Any:
    """The value that a field's text stands for.

    Raises:
        ValidationError: it is too long, too deep, no JSON, or an object in it has a key twice.
    """
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise invalid(name, f"has {num_bytes} bytes, the limit is {MAX_SCHEMA_BYTES}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        _check_writable(value)
        return value
    except RecursionError:
        raise invalid(name, f"is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise invalid(name, f"is no valid JSON: {error}") from None


def dump_json(value: Any) -> str:
    """JSON in its short form."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def settle_schema(schema: Any, refusal: Refusal, *, closed: bool) -> Schema:
    """A copy of a schema in the grammar library's terms.

    Args:
        refusal: the error that something is wrong at a place of the schema.
        closed: objects have no properties but those that are named, unless the schema says so.

    Raises:
        ValidationError: a keyword has a bad value or cannot be enforced.
    """
    return _Settler(schema, refusal, closed).settled()


class _Settler:
    """Walks over every place of a document that is a schema, once."""

    def __init__(self, document: Any, refusal: Refusal, closed: bool) -> None:
        self._document = json.loads(dump_json(document))
        self._error = refusal
        self._closed = closed
        self._seen: set[int] = set()
        self._referred: list[tuple[Any, Path]] = []
        self._anchors = {
            one["$anchor"]: one for one in _objects(self._document) if isinstance(one.get("$anchor"), str)
        }
        self._schemas: list[Schema] = []
        """All that were walked over."""
        self._has_references = False
        self._has_ids = any(isinstance(one.get("$id"), str) for one in _objects(self._document))

    def settled(self) -> Schema:
        if self._document is False:
            raise self._error((), "false accepts nothing")
        if self._document is True:
            return {}
        self._walk(self._document, ())
        while self._referred:
            self._walk(*self._referred.pop())
        if self._has_references and not self._has_ids:
            self._forbid_endless()
        settled: Schema = self._document
        return settled

    def _forbid_endless(self) -> None:
        """Forbid the parts that no finite value fits.

        Raises:
            ValidationError: the whole schema is one.
        """
        endless = Endless(self._schemas, self._target)
        if endless.holds(self._document):
            raise self._error(
                (), "no value fits it: it refers back to itself without end, or to what is false"
            )
        for schema in filter(endless.holds, self._schemas):
            schema["allOf"] = [*schema.get("allOf", ()), False]

    def _walk(self, schema: Any, path: Path) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise self._error(path, "a schema must be an object, true or false")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._schemas.append(schema)
        self._check_values(schema, path)
        for inner, place in [*keywords.subschemas(schema)]:
            self._walk(inner, path + place)
        for change in (self._set_aside, self._rewrite_items, self._rewrite_names, self._rewrite_patterns):
            change(schema, path)
        self._rewrite_format(schema, path)
        if "$ref" in schema:
            self._follow(schema["$ref"], (*path, "$ref"))
        if self._closed and "properties" in schema and not schema.keys() & keywords.OPENING:
            schema["additionalProperties"] = False

    def _check_values(self, schema: Schema, path: Path) -> None:
        for word, value in schema.items():
            rule = keywords.VALUES.get(word)
            if rule is not None and not rule.accepts(value):
                raise self._error((*path, word), f"{word} must be {rule.words}")

    def _set_aside(self, schema: Schema, path: Path) -> None:
        """Take out what asks for nothing; refuse what is left of the keywords that nobody enforces."""
        for word in [*schema]:
            if word in keywords.NOT_ENFORCED:
                if not keywords.asks_for_nothing(word, schema):
                    raise self._error((*path, word), f"the keyword {word} is not supported")
                del schema[word]
            elif word in keywords.COUNTS:
                schema[word] = int(schema[word])
        schema.pop("x-guidance", None)

    def _rewrite_items(self, schema: Schema, path: Path) -> None:
        """A list of items is an older draft's word for what is prefixItems now."""
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                raise self._error((*path, "items"), "items must be one schema")
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")
        schema.pop("additionalItems", None)

    def _rewrite_names(self, schema: Schema, path: Path) -> None:
        """propertyNames, where there are no named properties, is a pattern of property names and nothing else."""
        if "propertyNames" not in schema:
            return
        names = schema.pop("propertyNames")
        pattern = keywords.name_pattern(names)
        if pattern is None or schema.keys() & {"properties", "patternProperties"}:
            why = "propertyNames is supported without properties, and as an enum, a const or a pattern only"
            raise self._error((*path, "propertyNames"), why)
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    def _rewrite_patterns(self, schema: Schema, path: Path) -> None:
        if "pattern" in schema:
            schema["pattern"] = self._rust(schema["pattern"], (*path, "pattern"))
        if "patternProperties" in schema:
            schema["patternProperties"] = {
                self._rust(pattern, (*path, "patternProperties", pattern)): value
                for pattern, value in schema["patternProperties"].items()
            }

    def _rust(self, pattern: str, path: Path) -> str:
        try:
            return to_rust(pattern)
        except RegexError as error:
            raise self._error(path, f"the expression cannot be enforced: {error}") from None

    def _rewrite_format(self, schema: Schema, path: Path) -> None:
        name = schema.get("format")
        if name in REFUSED_FORMATS:
            raise self._error((*path, "format"), f"the format {name} is not supported")
        if name in AS_PATTERN:
            del schema["format"]
            pattern = {"pattern": f"^(?:{AS_PATTERN[name]})$"}
            if "pattern" in schema:
                schema["allOf"] = [*schema.get("allOf", []), pattern]
            else:
                schema |= pattern
        elif name is not None and name not in keywords.LIBRARY_FORMATS:
            del schema["format"]

    def _follow(self, reference: str, path: Path) -> None:
        """What a reference names must be a schema in the document, and is walked over like any other."""
        if self._has_ids:  # then what it is relative to is for the library to find out; it fetches nothing
            return
        self._has_references = True
        if not reference.startswith("#"):
            raise self._error(path, f"{reference!r:.200} is not in this schema, and nothing is fetched")
        if reference.startswith("#/") or reference == "#":
            try:
                self._referred.append((self._target(reference), path_of(reference)))
            except LookupError:
                raise self._error(path, f"{reference!r:.200} names nothing") from None
        elif reference[1:] not in self._anchors:
            raise self._error(path, f"{reference!r:.200} is no $anchor of this schema")

    def _target(self, reference: str) -> Any:
        """Find what a reference names; raises LookupError if that is nothing."""
        if reference.startswith("#/") or reference == "#":
            return find(self._document, path_of(reference))
        return self._anchors[reference[1:]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r:.100} twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _check_writable(value: Any) -> None:
    """Numbers beyond float and half surrogate pairs can be read and not written."""
    dump_json(value).encode()


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
        stack.extend(_children(one))


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [child for one in level for child in _children(one)]:
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
