"""Settled structural tags as rules of a grammar, in whatever dialect.

Invariant: a grammar is built from quoted pieces alone, so nothing in a tag can be read as a rule.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured_output.params import StructuredOutputsParams

Format = dict[str, Any]


class TagWriter(ABC):
    """Gives each format a rule. Dialects write sequences, `|`, `*`, `?`, `{m,n}` and parentheses alike.

    Args:
        special: literals of special tokens, which stand in texts for the tokens -> ids.
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
        """The name of a rule with that body."""

    @abstractmethod
    def _quoted(self, text: str) -> str:
        """A text as it stands."""

    @abstractmethod
    def _token(self, name: str) -> str:
        """A special token."""

    @abstractmethod
    def _schema(self, one: Format) -> str: ...

    @abstractmethod
    def _regex(self, one: Format) -> str: ...

    @abstractmethod
    def _grammar(self, one: Format) -> str: ...

    @abstractmethod
    def _free(self, excluded: list[str], not_first: str = "") -> str:
        """Text that holds none of these, and does not begin with one of those characters."""

    @abstractmethod
    def _triggered(self, one: Format) -> str: ...

    @abstractmethod
    def _until(self, one: Format) -> str: ...

    def _rule(self, one: Format) -> str:
        return self._named(self._writers[one["type"]](one))

    def _literal(self, text: str) -> str:
        """A text, in which the names of special tokens are these tokens."""
        parts = self._special.split(text) if self._special else [text]
        names = [self._token(part) if place % 2 else self._quoted(part) for place, part in enumerate(parts)]
        return " ".join(name for name in names if name != '""') or '""'

    def _before_special(self, text: str) -> str:
        """What stands in a text before the first name of a special token."""
        return self._special.split(text)[0] if self._special else text

    def _tag(self, one: Format) -> str:
        return f"{self._literal(one['begin'])} {self._rule(one['content'])} {self._literal(one['end'])}"

    def _rests(self, trigger: str, tags: list[Format]) -> list[str]:
        """How the tags go on that begin with a trigger."""
        return [
            f"{self._literal(tag['begin'][len(trigger) :])} {self._rule(tag['content'])} {self._literal(tag['end'])}"
            for tag in tags
            if tag["begin"].startswith(trigger)
        ]

    def _fields(self, one: Format) -> str:
        """From behind: what may follow when something came before, and when nothing did."""
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
    """A settled constraint of any kind as a format."""
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
