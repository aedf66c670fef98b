"""Detection of schemas that no finite value fits, because their references lead back to them.

Invariant: what is found here fits nothing; time and memory are linear in the size of the document. Contradictions of
values (lengths, numbers, types) are for the grammar library to find.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

SCALAR = "scalar"
KINDS = frozenset({"object", "array", SCALAR})
Kinds = frozenset[str]
Key = tuple[int, Kinds]
"""The identity of a schema, and of which kinds its value may be."""
Need = list[tuple[Any, Kinds]]
"""Schemas of which one must have a value."""


class Endless:
    """Schemas of a document that can have no finite value.

    Args:
        schemas: all schemas of the document.
        target: finds what a `$ref` names; None if that is not known.
    """

    def __init__(self, schemas: Iterable[Any], target: Callable[[str], Any]) -> None:
        self._target = target
        self._open: dict[Key, int] = {}
        """Needs of a schema that are not known to be met."""
        self._waiting: dict[Key, list[tuple[Key, int]]] = defaultdict(list)
        """Schema -> whose needs it meets, with the number of each."""
        self._met: set[tuple[Key, int]] = set()
        self._settle(schemas)

    def holds(self, schema: Any) -> bool:
        """Tell whether no finite value fits a schema."""
        return self._open[id(schema), KINDS] > 0

    def _settle(self, schemas: Iterable[Any]) -> None:
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
