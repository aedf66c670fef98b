# SPDX-License-Identifier: Apache-2.0
"""Structural tags: constraints of fixed text, free text and schemas; and their conversion to grammar rules.

Invariant: after `normalize_tag` a tag is one tree of the formats below, with normalized schemas and no references.
Input has vLLM's two forms: `{"type": "structural_tag", "format": FORMAT}`, and the older one of `structures` and
`triggers`. Grammars are built from quoted pieces only, so nothing in a tag can be read as a rule.

| format | accepted text |
|---|---|
| `const_string` `value` | that text |
| `json_schema` `json_schema` | a JSON value of the schema |
| `regex` `pattern` | a full match |
| `grammar` `grammar` | text of a Lark grammar |
| `any_text` | anything |
| `sequence` `elements` | one after the other |
| `or` `elements` | one of them |
| `tag` `begin` `content` `end` | the content between two texts |
| `triggered_tags` `triggers` `tags` `at_least_one` `stop_after_first` | free text in which a trigger starts a tag |
| `tags_with_separator` `tags` `separator` `at_least_one` `stop_after_first` | tags separated by that text |
| `until` `end` `pattern` | text, matching the expression if given, up to and including the first `end` |
| `fields` `elements` `required` `separator` | these in order; some may be missing if not required |
| `list` `element` `separator` `min_items` `max_items` | that many elements |

A format may have an `origin`, the request field and path that errors name. `any_text` and `triggered_tags` may have
`excludes`, texts that free text does not contain, and `not_first`, characters that free text does not start with after
whitespace.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import ValidationError
from quire.json_schema.schema import Path, normalize_schema, parse_json, pointer
from quire.structured_outputs_params import PARAM, StructuredOutputsParams, invalid

Format = dict[str, Any]


class TagWriter(ABC):
    """Writes a rule for each format. Dialects share sequences, `|`, `*`, `?`, `{m,n}` and parentheses.

    Args:
        special: literals of special tokens, as texts name them -> ids.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._ids = special
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special else None
        self._writers: dict[str, Callable[[Format], str]] = {
            "const_string": lambda one: self._literal(one["value"]),
            "choice": lambda one: " | ".join(map(self._quoted, one["choice"])),
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": lambda one: self._free(one.get("excludes", []), one.get("not_first", "")),
            "sequence": lambda one: " ".join(map(self._rule, one["elements"])),
            "or": lambda one: " | ".join(map(self._rule, one["elements"])),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "until": self._until,
            "fields": self._fields,
            "list": self._list,
        }

    @abstractmethod
    def _named(self, body: str) -> str:
        """Return the name of a rule with that body."""

    @abstractmethod
    def _quoted(self, text: str) -> str:
        """Quote a text."""

    @abstractmethod
    def _token(self, name: str) -> str:
        """Return the notation of a special token."""

    @abstractmethod
    def _schema(self, one: Format) -> str: ...

    @abstractmethod
    def _regex(self, one: Format) -> str: ...

    @abstractmethod
    def _grammar(self, one: Format) -> str: ...

    @abstractmethod
    def _free(self, excluded: list[str], not_first: str = "") -> str:
        """Write text without the excluded texts, not starting with the given characters."""

    @abstractmethod
    def _triggered(self, one: Format) -> str: ...

    @abstractmethod
    def _until(self, one: Format) -> str: ...

    def _rule(self, one: Format) -> str:
        return self._named(self._writers[one["type"]](one))

    def _literal(self, text: str) -> str:
        """Write a text in which names of special tokens stand for the tokens."""
        parts = self._special.split(text) if self._special else [text]
        names = [self._token(part) if place % 2 else self._quoted(part) for place, part in enumerate(parts)]
        return " ".join(name for name in names if name != '""') or '""'

    def _before_special(self, text: str) -> str:
        """Return the text before the first name of a special token."""
        return self._special.split(text)[0] if self._special else text

    def _tag(self, one: Format) -> str:
        return f"{self._literal(one['begin'])} {self._rule(one['content'])} {self._literal(one['end'])}"

    def _rests(self, trigger: str, tags: list[Format]) -> list[str]:
        """Return the continuations of the tags that begin with a trigger."""
        return [
            f"{self._literal(tag['begin'][len(trigger) :])} {self._rule(tag['content'])} {self._literal(tag['end'])}"
            for tag in tags
            if tag["begin"].startswith(trigger)
        ]

    def _fields(self, one: Format) -> str:
        """Write from the end: what may follow after a field, and what at the start."""
        separator = self._named(self._literal(one["separator"]))
        begun = fresh = self._named('""')
        for element, is_required in reversed(list(zip(one["elements"], one["required"], strict=True))):
            rule = self._rule(element)
            with_it = f"{rule} {begun}"
            fresh = self._named(with_it if is_required else f"{with_it} | {fresh}")
            begun = self._named(
                f"{separator} {with_it}" if is_required else f"{separator} {with_it} | {begun}"
            )
        return fresh

    def _list(self, one: Format) -> str:
        rule, least, most = self._rule(one["element"]), one["min_items"], one["max_items"]
        if most == 0:
            return '""'
        if most == 1:
            many = rule
        else:
            more = self._named(f"{self._literal(one['separator'])} {rule}")
            many = f"{rule} {more}{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return many if least else f'{self._named(many)} | ""'

    def _separated(self, one: Format) -> str:
        tag = self._named(" | ".join(self._rule(tag) for tag in one["tags"]))
        if one["stop_after_first"]:
            return tag if one["at_least_one"] else f"{tag} | {self._literal('')}"
        many = f"{tag} ({self._literal(one['separator'])} {tag})*"
        return many if one["at_least_one"] else f"({many})?"


def format_of(params: StructuredOutputsParams) -> Format:
    """Return a normalized constraint of any kind as a format."""
    if params.json is not None:
        return {"type": "json_schema", "json_schema": json.loads(str(params.json))}
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.choice is not None:
        return {"type": "choice", "choice": params.choice}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    tag: Format = json.loads(str(params.structural_tag))
    return tag


NAME = "structural_tag"
ANY = "(?s:.)*"  # expression of any text
MAX_ITEMS = 1024  # most items of a list whose number is given


def normalize_tag(tag: Any, *, closed: bool) -> Format:
    """Return the format tree of a structural tag.

    Raises:
        ValidationError: wrong form, or a schema in it cannot be enforced; the message has the JSON pointer.
    """
    return _FormatReader(closed).format(tag, (f"{PARAM}.{NAME}",))


def as_format(params: StructuredOutputsParams) -> Format:
    """Return a constraint as sent as part of a structural tag; its flags belong to the tag.

    Raises:
        ValidationError: its text is not a JSON object.
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
    """Return a structural tag as a constraint, with the flags of a constraint that is part of it."""
    if wanted is None:
        return StructuredOutputsParams(structural_tag=tag)
    return StructuredOutputsParams(
        structural_tag=tag,
        disable_any_whitespace=wanted.disable_any_whitespace,
        disable_additional_properties=wanted.disable_additional_properties,
        whitespace_pattern=wanted.whitespace_pattern,
    )


def parts_of(tag: Format) -> Iterator[Format]:
    """Yield a normalized format and all its parts."""
    yield tag
    inner = [tag[key] for key in ("content", "element") if key in tag]
    for one in (*inner, *tag.get("elements", ()), *tag.get("tags", ())):
        yield from parts_of(one)


def from_fields(tag: Format) -> list[Format]:
    """Return the parts of a normalized format that come from fields of the request."""
    return [one for one in parts_of(tag) if "origin" in one]


def at_origin(origin: Sequence[str], path: Path, why: str) -> ValidationError:
    """Return an error at a path of a schema within another field; definitions belong to the whole."""
    field, *above = origin
    whole = path if path[:1] in (("$defs",), ("definitions",)) else (*above, *path)
    return ValidationError(f"{field} at {pointer(whole)}: {why}", param=field)


def _error(path: Path, why: str) -> ValidationError:
    field, *place = path
    return ValidationError(f"{field} at {pointer(tuple(place))}: {why}", param=field)


class _FormatReader:
    """Checks formats and normalizes their schemas; a path begins with the request field."""

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
        """Return one format in normal form."""
        origin = self._texts(one, "origin", path) if isinstance(one, dict) and one.get("origin") else []
        path = tuple(origin) or path
        if not isinstance(one, dict) or one.get("type") not in self._readers:
            known = ", ".join(kind for kind in self._readers if kind != NAME)
            raise _error(path, f"a format must be an object whose type is one of {known}")
        more = {"origin": origin} if origin else {}
        return {"type": one["type"], **self._readers[one["type"]](one, path), **more}

    def _old_form(self, tag: Format, path: Path) -> Format:
        """Convert {"structures": [{begin, schema, end}], "triggers": [...]}."""
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
                raise _error(
                    path, f"tag {index} begins with {tag['begin']!r:.100}, which starts with no trigger"
                )
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

        return normalize_schema(one.get(key, True), refusal, closed=self._closed)

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
