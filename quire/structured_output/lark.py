"""Structural tags as Lark grammars, in the dialect of llguidance.

Invariant: a grammar is built from quoted pieces alone, so nothing in a tag can be read as a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured_output.params import StructuredOutputsParams

ANY_TEXT = r"/(?s:.)*/"
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Where a text is forced, every way to spell it in tokens is allowed, and not one that the library prefers."""
Format = dict[str, Any]


def lark_of(
    tag: Format, json_options: dict[str, Any], special: Mapping[str, int], quote: Callable[[str], str]
) -> str:
    """The grammar of a settled structural tag.

    Args:
        json_options: of the schemas in it ("x-guidance").
        special: literals of special tokens, which stand in texts for the tokens -> ids.
        quote: makes of an expression what stands between slashes.
    """
    return _Writer(json_options, special, quote).grammar(tag)


class _Writer:
    """Gives each format a rule."""

    def __init__(
        self, json_options: dict[str, Any], special: Mapping[str, int], quote: Callable[[str], str]
    ) -> None:
        self._json_options = json_options
        self._quote = quote
        self._ids = special
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if special else None
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []
        self._writers: dict[str, Callable[[Format], str]] = {
            "const_string": lambda one: self._literal(one["value"]),
            "choice": lambda one: " | ".join(map(_quoted, one["choice"])),
            "json_schema": self._schema,
            "regex": lambda one: f"/{self._quote(one['pattern'])}/",
            "grammar": self._grammar,
            "any_text": lambda one: ANY_TEXT,
            "sequence": lambda one: " ".join(map(self._rule, one["elements"])),
            "or": lambda one: " | ".join(map(self._rule, one["elements"])),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, tag: Format) -> str:
        """The whole grammar, as llguidance takes it."""
        start = self._rule(tag)
        lark = "\n".join([NO_FORCING, f"start: {start}", *self._rules])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *self._grammars]})

    def _rule(self, one: Format) -> str:
        return self._named(self._writers[one["type"]](one))

    def _named(self, body: str, mark: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text, in which the names of special tokens are these tokens."""
        parts = self._special.split(text) if self._special else [text]
        names = [self._token(part) if place % 2 else _quoted(part) for place, part in enumerate(parts)]
        return " ".join(name for name in names if name != '""') or '""'

    def _token(self, name: str) -> str:
        return f"<[{self._ids[name]}]>"

    def _schema(self, one: Format) -> str:
        return "%json " + json.dumps(
            {**one["json_schema"], "x-guidance": self._json_options}, ensure_ascii=False
        )

    def _grammar(self, one: Format) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": one["grammar"]})
        return f"@{name}"

    def _tag(self, one: Format) -> str:
        return f"{self._literal(one['begin'])} {self._rule(one['content'])} {self._literal(one['end'])}"

    def _triggered(self, one: Format) -> str:
        """Free text runs up to the first trigger, and from there on a tag goes on as its trigger began."""
        turns = " | ".join(self._turn(trigger, one["tags"]) for trigger in one["triggers"])
        turn = self._named(turns)
        many = turn if one["stop_after_first"] else f"{turn}+"
        tail = "" if one["stop_after_first"] else f" {self._free(one['triggers'])}"
        return f"{many}{tail}" if one["at_least_one"] else f"{many}{tail} | {self._free(one['triggers'])}"

    def _turn(self, trigger: str, tags: list[Format]) -> str:
        begun = self._begun(trigger)
        rests = [
            f"{self._literal(tag['begin'][len(trigger) :])} {self._rule(tag['content'])} {self._literal(tag['end'])}"
            for tag in tags
            if tag["begin"].startswith(trigger)
        ]
        return f"{begun} {self._named(' | '.join(rests))}" if rests else self._named("/[^\\s\\S]/")

    def _begun(self, trigger: str) -> str:
        """Free text and the trigger."""
        if self._special and self._special.fullmatch(trigger):
            return f"{self._named(ANY_TEXT)} {self._token(trigger)}"
        return self._named(f"/(?s:.)*/ {_quoted(trigger)}", "[lazy]")

    def _free(self, triggers: list[str]) -> str:
        """Text without a trigger."""
        texts = [trigger for trigger in triggers if not (self._special and self._special.fullmatch(trigger))]
        if not texts:
            return self._named(ANY_TEXT)
        number = len(self._rules)
        bad = "|".join(re.escape(text) for text in texts)
        self._rules.append(f"T{number}: {ANY_TEXT} & ~/(?s:.)*({self._quote(bad)})(?s:.)*/")
        return f"T{number}"

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


def _quoted(text: str) -> str:
    """A text between quotes; of the control characters JSON leaves one as it is, at which Lark stops."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
