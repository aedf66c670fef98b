"""Structural tags: constraints made of pieces, some fixed, some free, some of a schema.

Invariant: after `settle_tag` a tag is one tree of the formats below, every schema in it is settled, and nothing is left
to look up. Two spellings come in, both vLLM's: `{"type": "structural_tag", "format": FORMAT}`, and the older one of
`structures` and `triggers`. `{"type": "sequence", ...}` and its like are also how a program says "this text, then a
value of that schema".

| format | text that it takes |
|---|---|
| `const_string` `value` | that text |
| `json_schema` `json_schema` | a JSON value of the schema |
| `regex` `pattern` | what matches as a whole |
| `grammar` `grammar` | what a Lark grammar takes |
| `any_text` | anything |
| `sequence` `elements` | one after the other |
| `or` `elements` | one of them |
| `tag` `begin` `content` `end` | the content between two texts |
| `triggered_tags` `triggers` `tags` `at_least_one` `stop_after_first` | free text, in which a trigger begins a tag |
| `tags_with_separator` `tags` `separator` `at_least_one` `stop_after_first` | tags, and that text between them |
| `until` `end` `pattern` | text that matches, if an expression is given, up to and with the first `end` |
| `fields` `elements` `required` `separator` | these in this order, without some that are not required |
| `list` `element` `separator` `min_items` `max_items` | so many of them |

A format may have an `origin`: the field of the request that it is from, and its place there, by which errors call it.
`any_text` and `triggered_tags` may have `excludes`, texts that no free text holds, and `not_first`, characters with
which the text does not begin as long as it is free, white space aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.errors import ValidationError
from quire.structured_output.params import PARAM, StructuredOutputsParams, invalid
from quire.structured_output.pointer import Path, pointer
from quire.structured_output.schema import parse_json, settle_schema

NAME = "structural_tag"
ANY = "(?s:.)*"
"""The expression of any text."""
MAX_ITEMS = 1024
"""Of a list, where their number is given."""
Format = dict[str, Any]


def settle_tag(tag: Any, *, closed: bool) -> Format:
    """The tree of formats of a structural tag.

    Raises:
        ValidationError: it has another shape, or a schema in it cannot be enforced; the message has the JSON pointer.
    """
    return _Reader(closed).format(tag, (f"{PARAM}.{NAME}",))


def as_format(params: StructuredOutputsParams) -> Format:
    """A constraint as it came, as a part of a structural tag; its flags are for the tag.

    Raises:
        ValidationError: its text is no JSON, or no object.
    """
    return {**_as_format(params), "origin": [f"{PARAM}.{params.kind}"]}


def _as_format(params: StructuredOutputsParams) -> Format:
    if params.json is not None:
        return {"type": "json_schema", "json_schema": params.json_value}
    if params.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if params.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in params.choice]}
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    tag = parse_json(NAME, str(params.structural_tag))
    if not isinstance(tag, dict):
        raise invalid(NAME, "must be an object")
    return tag


def as_tag(tag: Format, wanted: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    """A structural tag as a constraint, with the flags of one that is a part of it."""
    if wanted is None:
        return StructuredOutputsParams(structural_tag=tag)
    return StructuredOutputsParams(
        structural_tag=tag,
        disable_any_whitespace=wanted.disable_any_whitespace,
        disable_additional_properties=wanted.disable_additional_properties,
        whitespace_pattern=wanted.whitespace_pattern,
    )


def parts_of(tag: Format) -> Iterator[Format]:
    """A settled format and all that it is made of."""
    yield tag
    inner = [tag[key] for key in ("content", "element") if key in tag]
    for one in (*inner, *tag.get("elements", ()), *tag.get("tags", ())):
        yield from parts_of(one)


def from_fields(tag: Format) -> list[Format]:
    """The parts of a settled format that are fields of the request, or of one."""
    return [one for one in parts_of(tag) if "origin" in one]


def at_origin(origin: Sequence[str], path: Path, why: str) -> ValidationError:
    """An error at a place of a schema that is part of another field; definitions are those of all of it."""
    field, *above = origin
    whole = path if path[:1] in (("$defs",), ("definitions",)) else (*above, *path)
    return ValidationError(f"{field} at {pointer(whole)}: {why}", param=field)


def _error(path: Path, why: str) -> ValidationError:
    field, *place = path
    return ValidationError(f"{field} at {pointer(tuple(place))}: {why}", param=field)


class _Reader:
    """Checks formats, and settles the schemas in them; a path begins with the field of the request."""

    def __init__(self, closed: bool) -> None:
        self._closed = closed
        self._readers: dict[str, Callable[[Format, Path], Format]] = {
            "const_string": lambda one, path: {"value": self._text(one, "value", path)},
            "regex": lambda one, path: {"pattern": self._text(one, "pattern", path)},
            "grammar": lambda one, path: {"grammar": self._text(one, "grammar", path)},
            "json_schema": self._value,
            "any_text": self._free,
            "sequence": self._elements,
            "or": self._elements,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "until": self._until,
            "fields": self._fields,
            "list": self._list_of,
            NAME: self._nested,
        }

    def format(self, one: Any, path: Path) -> Format:
        """One format in its one form."""
        origin = self._texts(one, "origin", path) if isinstance(one, dict) and one.get("origin") else []
        path = tuple(origin) or path
        if not isinstance(one, dict) or one.get("type") not in self._readers:
            known = ", ".join(kind for kind in self._readers if kind != NAME)
            raise _error(path, f"a format must be an object whose type is one of {known}")
        more = {"origin": origin} if origin else {}
        return {"type": one["type"], **self._readers[one["type"]](one, path), **more}

    def _old_form(self, tag: Format, path: Path) -> Format:
        """{"structures": [{begin, schema, end}], "triggers": [...]}"""
        structures = self._list(tag, "structures", path)
        tags = []
        for index, structure in enumerate(structures):
            place = (*path, "structures", str(index))
            if not isinstance(structure, dict):
                raise _error(place, "must be an object of begin, schema and end")
            content = {"type": "json_schema", "json_schema": self._schema(structure, "schema", place)}
            tags.append({"type": "tag", **self._ends(structure, place), "content": content})
        return self._with_triggers(tags, self._texts(tag, "triggers", path), tag, path)

    def _elements(self, one: Format, path: Path) -> Format:
        elements = self._list(one, "elements", path)
        return {
            "elements": [
                self.format(inner, (*path, "elements", str(index))) for index, inner in enumerate(elements)
            ]
        }

    def _tag(self, one: Format, path: Path) -> Format:
        return {**self._ends(one, path), "content": self.format(one.get("content"), (*path, "content"))}

    def _tags(self, one: Format, path: Path) -> list[Format]:
        tags = []
        for index, inner in enumerate(self._list(one, "tags", path)):
            if not isinstance(inner, dict):
                raise _error((*path, "tags", str(index)), "must be a tag")
            tags.append(self.format({**inner, "type": "tag"}, (*path, "tags", str(index))))
        return tags

    def _triggered(self, one: Format, path: Path) -> Format:
        return self._with_triggers(self._tags(one, path), self._texts(one, "triggers", path), one, path)

    def _with_triggers(self, tags: list[Format], triggers: list[str], one: Format, path: Path) -> Format:
        for index, tag in enumerate(tags):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise _error(path, f"tag {index} begins with {tag['begin']!r:.100}, and no trigger does")
        more = {**self._free(one, path), **self._flags(one, path)}
        return {"type": "triggered_tags", "tags": tags, "triggers": triggers, **more}

    def _separated(self, one: Format, path: Path) -> Format:
        separator = self._text(one, "separator", path)
        return {"tags": self._tags(one, path), "separator": separator, **self._flags(one, path)}

    def _nested(self, one: Format, path: Path) -> Format:
        return self.format(one["format"], (*path, "format")) if "format" in one else self._old_form(one, path)

    def _until(self, one: Format, path: Path) -> Format:
        end, pattern = self._text(one, "end", path), one.get("pattern", ANY)
        if not end:
            raise _error((*path, "end"), "must not be empty")
        return {"end": end, "pattern": self._text({"pattern": pattern}, "pattern", path)}

    def _fields(self, one: Format, path: Path) -> Format:
        elements = self._elements(one, path) if one.get("elements") != [] else {"elements": []}
        required, num_elements = one.get("required"), len(elements["elements"])
        if not isinstance(required, list) or [type(flag) for flag in required] != [bool] * num_elements:
            raise _error((*path, "required"), "must hold true or false for each element")
        return {**elements, "required": required, "separator": self._text(one, "separator", path)}

    def _list_of(self, one: Format, path: Path) -> Format:
        least, most = one.get("min_items", 0), one.get("max_items")
        counts = [least] if most is None else [least, most]
        if (
            any(type(count) is not int or not 0 <= count <= MAX_ITEMS for count in counts)
            or counts[-1] < least
        ):
            raise _error(path, f"min_items and max_items must be integers from 0 to {MAX_ITEMS}, in order")
        element = self.format(one.get("element"), (*path, "element"))
        separator = self._text(one, "separator", path)
        return {"element": element, "separator": separator, "min_items": least, "max_items": most}

    def _free(self, one: Format, path: Path) -> Format:
        free: Format = {}
        if one.get("excludes"):
            free["excludes"] = self._texts(one, "excludes", path)
        if one.get("not_first"):
            free["not_first"] = self._text(one, "not_first", path)
        return free

    def _flags(self, one: Format, path: Path) -> dict[str, bool]:
        flags = {name: one.get(name, False) for name in ("at_least_one", "stop_after_first")}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise _error((*path, name), "must be true or false")
        return flags

    def _ends(self, one: Format, path: Path) -> dict[str, str]:
        return {name: self._text(one, name, path) for name in ("begin", "end")}

    def _value(self, one: Format, path: Path) -> Format:
        return {"json_schema": self._schema(one, "json_schema", path, one.get("origin") or ())}

    def _schema(self, one: Format, key: str, path: Path, origin: Sequence[str] = ()) -> Format:
        def refusal(place: Path, why: str) -> ValidationError:
            return at_origin(origin, place, why) if origin else _error((*path, key, *place), why)

        return settle_schema(one.get(key, True), refusal, closed=self._closed)

    def _text(self, one: Format, key: str, path: Path) -> str:
        if not isinstance(one.get(key), str):
            raise _error((*path, key), "must be text")
        return str(one[key])

    def _texts(self, one: Format, key: str, path: Path) -> list[str]:
        texts = self._list(one, key, path)
        if not all(isinstance(text, str) and text for text in texts):
            raise _error((*path, key), "must be a list of texts that are not empty")
        return texts

    def _list(self, one: Format, key: str, path: Path) -> list[Any]:
        found = one.get(key)
        if not isinstance(found, list) or not found:
            raise _error((*path, key), "must be a list that is not empty")
        return found
