# SPDX-License-Identifier: Apache-2.0
"""Normalizes a client's JSON schema into one that the grammar library enforces as the standard means it.

Invariant: the result accepts a value only if the client's schema (draft 2020-12) does. Whatever cannot be enforced is
refused with a JSON pointer (RFC 6901). Every keyword of the standard is in `VALUES`, in `NOT_ENFORCED` or without
effect; other keywords are ignored.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from quire.errors import ValidationError
from quire.json_schema.ecma_regex import AS_PATTERN, RegexError, to_rust
from quire.json_schema.ecma_regex import LIBRARY as LIBRARY_FORMATS
from quire.json_schema.ecma_regex import REFUSED as REFUSED_FORMATS
from quire.structured_outputs_params import invalid

SCALAR = "scalar"
KINDS = frozenset({"object", "array", SCALAR})
Kinds = frozenset[str]
Key = tuple[int, Kinds]  # identity of a schema, and the kinds that its value may have
Need = list[tuple[Any, Kinds]]  # schemas of which one must have a value


class EndlessSchemas:
    """Schemas of a document that no finite value matches, because of their references.

    Invariant: what is found here matches nothing; time and memory are linear in the document. Contradictions of values
    (lengths, numbers, types) are left to the grammar library.

    Args:
        schemas: all schemas of the document.
        target: resolves a `$ref`; None if unknown.
    """

    def __init__(self, schemas: Iterable[Any], target: Callable[[str], Any]) -> None:
        self._target = target
        self._open: dict[Key, int] = {}
        """Unmet needs of each schema."""
        self._waiting: dict[Key, list[tuple[Key, int]]] = defaultdict(list)
        """Schema -> needs that it meets, with the number of each."""
        self._met: set[tuple[Key, int]] = set()
        self._solve(schemas)

    def holds(self, schema: Any) -> bool:
        """Return whether no finite value matches a schema."""
        return self._open[id(schema), KINDS] > 0

    def _solve(self, schemas: Iterable[Any]) -> None:
        todo: Need = [(schema, KINDS) for schema in schemas]
        possible = []
        while todo:
            schema, kinds = todo.pop()
            key = id(schema), kinds
            if key in self._open:
                continue
            needs = [*self._needs(schema, kinds)]
            self._open[key] = len(needs)
            if not needs:
                possible.append(key)
            for number, options in enumerate(needs):
                for option, own in options:
                    self._waiting[id(option), own].append((key, number))
                todo += options
        self._spread(possible)

    def _spread(self, possible: list[Key]) -> None:
        while possible:
            for need in self._waiting.pop(possible.pop(), ()):
                if need not in self._met:
                    self._met.add(need)
                    self._open[need[0]] -= 1
                    if not self._open[need[0]]:
                        possible.append(need[0])

    def _needs(self, schema: Any, kinds: Kinds) -> Iterator[Need]:
        if schema is False:
            yield []
        if not isinstance(schema, dict):
            return
        kinds = kinds.intersection(*map(_kinds, (schema, *schema.get("allOf", ()))))
        if "$ref" in schema and (target := self._target(schema["$ref"])) is not None:
            yield [(target, kinds)]
        yield from ([(one, kinds)] for one in schema.get("allOf", ()))
        yield from ([(one, kinds) for one in schema[word]] for word in ("anyOf", "oneOf") if word in schema)
        if kinds in (frozenset({"object"}), frozenset({"array"})) and not schema.keys() & {"enum", "const"}:
            inner = _members(schema) if "object" in kinds else _items(schema)
            yield from ([(one, KINDS)] for one in inner)


def _kinds(schema: Any) -> Kinds:
    if not isinstance(schema, dict) or "type" not in schema:
        return KINDS
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return frozenset(name if name in KINDS else SCALAR for name in names)


def _members(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the properties that an object must have."""
    named = schema.get("properties", {})
    others = None if "patternProperties" in schema else schema.get("additionalProperties")
    for name in schema.get("required", ()):
        inner = named.get(name, others)
        if inner is not None:
            yield inner


def _items(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the items that an array must have."""
    least, first = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
    yield from first[:least]
    if least > len(first) and "items" in schema:
        yield schema["items"]


__all__ = ["LIBRARY_FORMATS"]

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
OPENING = frozenset({"additionalProperties", "patternProperties"})
"""Keywords that allow further properties."""

NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
}
"""Keyword -> values without effect. Any other value is refused."""

IDLE_WITHOUT = {
    "if": frozenset({"then", "else"}),
    "then": frozenset({"if"}),
    "else": frozenset({"if"}),
    "minContains": frozenset({"contains"}),
    "maxContains": frozenset({"contains"}),
}
"""Keyword -> keywords of which it needs one to have an effect."""

_ONE = ("additionalProperties", "items", "additionalItems")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


class Rule(NamedTuple):
    accepts: Callable[[Any], bool]
    words: str


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and int(value) == value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_COUNT = Rule(_is_count, "a whole number that is not negative")
_NUMBER = Rule(_is_number, "a number")
_TEXT = Rule(lambda value: isinstance(value, str), "text")
_SCHEMA = Rule(_is_schema, "a schema: an object, true or false")
_SCHEMAS = Rule(
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
    "a list of at least one schema",
)
_NAMED_SCHEMAS = Rule(
    lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())), "an object of schemas"
)
_NAMES = Rule(
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of names"
)

VALUES: dict[str, Rule] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": Rule(lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id", "$schema"), _TEXT),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _SCHEMA),
    "items": Rule(lambda value: _is_schema(value) or _SCHEMAS.accepts(value), "a schema"),
    **dict.fromkeys(_MANY, _SCHEMAS),
    **dict.fromkeys(_NAMED, _NAMED_SCHEMAS),
    "required": _NAMES,
    "type": Rule(_is_type, f"one or a list of {', '.join(sorted(TYPES))}"),
    "enum": Rule(lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
}


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the schemas in a valid schema with their paths; for names see `name_pattern`."""
    for word, value in schema.items():
        if word in _NAMED:
            yield from ((inner, (word, name)) for name, inner in value.items())
        elif word in _MANY or (word == "items" and isinstance(value, list)):
            yield from ((inner, (word, str(index))) for index, inner in enumerate(value))
        elif word in _ONE:
            yield value, (word,)


def asks_for_nothing(word: str, schema: dict[str, Any]) -> bool:
    """Return whether an unenforced keyword has no effect on what is accepted."""
    if word in IDLE_WITHOUT and not schema.keys() & IDLE_WITHOUT[word]:
        return True
    value = schema[word]
    return any(value == idle and type(value) is type(idle) for idle in NOT_ENFORCED[word])


def name_pattern(names: Any) -> str | None:
    """Return a JSON Schema expression for the names that `propertyNames` allows; None if there is no simple one."""
    if names is True or names == {}:
        return ""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    rest = names.keys() - {"type", "title", "description", "default", "examples", "$comment"}
    if rest == {"pattern"}:
        return str(names["pattern"])
    values = names["enum"] if rest == {"enum"} else [names["const"]] if rest == {"const"} else None
    if values is None or not all(isinstance(value, str) for value in values):
        return "" if not rest else None
    return f"^(?:{'|'.join(re.escape(value) for value in values)})$"


Path = tuple[str, ...]


def pointer(path: Path) -> str:
    """Return the JSON pointer of a path for an error message; "/" is the whole document."""
    return "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def path_of(fragment: str) -> Path:
    """Return the path of a `$ref` fragment ("#/a/b")."""
    parts = unquote(fragment.removeprefix("#")).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def find(document: Any, path: Path) -> Any:
    """Return the value at a path.

    Raises:
        LookupError: there is nothing.
    """
    for part in path:
        if isinstance(document, list):
            if not part.isdigit() or int(part) >= len(document):
                raise LookupError(part)
            document = document[int(part)]
        elif isinstance(document, dict):
            document = document[part]
        else:
            raise LookupError(part)
    return document


MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 64
Schema = dict[str, Any]
Refusal = Callable[[Path, str], ValidationError]


def parse_json(name: str, text: str) -> Any:
    """Return the value of a field's JSON text.

    Raises:
        ValidationError: too long, too deep, not JSON, or an object with a duplicate key.
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
    """Return JSON in its short form."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def normalize_schema(schema: Any, refusal: Refusal, *, closed: bool) -> Schema:
    """Return a copy of a schema in the grammar library's terms.

    Args:
        refusal: makes the error about a path of the schema.
        closed: objects have only named properties, unless the schema sets additionalProperties.

    Raises:
        ValidationError: a keyword has a bad value or cannot be enforced.
    """
    return _Normalizer(schema, refusal, closed).normalized()


class _Normalizer:
    """Normalization of one document, each schema visited once."""

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
        """All visited schemas."""
        self._has_references = False
        self._has_ids = any(isinstance(one.get("$id"), str) for one in _objects(self._document))

    def normalized(self) -> Schema:
        if self._document is False:
            raise self._error((), "false accepts nothing")
        if self._document is True:
            return {}
        self._walk(self._document, ())
        while self._referred:
            self._walk(*self._referred.pop())
        if self._has_references and not self._has_ids:
            self._forbid_endless()
        normalized: Schema = self._document
        return normalized

    def _forbid_endless(self) -> None:
        """Forbid the parts that no finite value matches.

        Raises:
            ValidationError: the whole schema is unsatisfiable.
        """
        endless = EndlessSchemas(self._schemas, self._target)
        if endless.holds(self._document):
            raise self._error((), "no value matches it: it refers to itself without end, or to false")
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
        for inner, place in [*subschemas(schema)]:
            self._walk(inner, path + place)
        for change in (
            self._drop_unenforced,
            self._rewrite_items,
            self._rewrite_names,
            self._rewrite_patterns,
        ):
            change(schema, path)
        self._rewrite_format(schema, path)
        if "$ref" in schema:
            self._follow(schema["$ref"], (*path, "$ref"))
        if self._closed and "properties" in schema and not schema.keys() & OPENING:
            schema["additionalProperties"] = False

    def _check_values(self, schema: Schema, path: Path) -> None:
        for word, value in schema.items():
            rule = VALUES.get(word)
            if rule is not None and not rule.accepts(value):
                raise self._error((*path, word), f"{word} must be {rule.words}")

    def _drop_unenforced(self, schema: Schema, path: Path) -> None:
        """Drop keywords without effect; refuse other unenforced keywords."""
        for word in [*schema]:
            if word in NOT_ENFORCED:
                if not asks_for_nothing(word, schema):
                    raise self._error((*path, word), f"the keyword {word} is not supported")
                del schema[word]
            elif word in COUNTS:
                schema[word] = int(schema[word])
        schema.pop("x-guidance", None)

    def _rewrite_items(self, schema: Schema, path: Path) -> None:
        """Rewrite a list of items, an older draft's form of prefixItems."""
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                raise self._error((*path, "items"), "items must be one schema")
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")
        schema.pop("additionalItems", None)

    def _rewrite_names(self, schema: Schema, path: Path) -> None:
        """Rewrite propertyNames without named properties as patternProperties."""
        if "propertyNames" not in schema:
            return
        names = schema.pop("propertyNames")
        pattern = name_pattern(names)
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
        elif name is not None and name not in LIBRARY_FORMATS:
            del schema["format"]

    def _follow(self, reference: str, path: Path) -> None:
        """Queue the schema that a reference names, which must be in the document."""
        if self._has_ids:  # the library resolves relative references; it fetches nothing
            return
        self._has_references = True
        if not reference.startswith("#"):
            raise self._error(
                path, f"{reference!r:.200} is not in this schema, and references are not fetched"
            )
        if reference.startswith("#/") or reference == "#":
            try:
                self._referred.append((self._target(reference), path_of(reference)))
            except LookupError:
                raise self._error(path, f"{reference!r:.200} does not exist") from None
        elif reference[1:] not in self._anchors:
            raise self._error(path, f"{reference!r:.200} is not an $anchor of this schema")

    def _target(self, reference: str) -> Any:
        """Return what a reference names; raises LookupError."""
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
    raise ValueError(f"{name} is not a JSON number")


def _check_writable(value: Any) -> None:
    """Check that the value can be written: numbers beyond float and lone surrogates cannot."""
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
