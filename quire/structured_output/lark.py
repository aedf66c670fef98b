"""Structural tags as Lark grammars, in the dialect of llguidance.

Invariant: a grammar is built from quoted pieces alone, so nothing in a tag can be read as a rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured_output.tag_writer import Format, TagWriter

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Where a text is forced, every way to spell it in tokens is allowed, and not one that the library prefers."""


def lark_of(
    tag: Format,
    json_options: dict[str, Any],
    special: Mapping[str, int],
    quote: Callable[[str], str],
    as_lark: Callable[[str], str],
) -> str:
    """The grammar of a settled structural tag.

    Args:
        json_options: of the schemas in it ("x-guidance").
        special: literals of special tokens, which stand in texts for the tokens -> ids.
        quote: makes of an expression what stands between slashes.
        as_lark: makes of a grammar one of Lark's.
    """
    return _Writer(json_options, special, quote, as_lark).grammar(tag)


class _Writer(TagWriter):
    def __init__(
        self,
        json_options: dict[str, Any],
        special: Mapping[str, int],
        quote: Callable[[str], str],
        as_lark: Callable[[str], str],
    ) -> None:
        super().__init__(special)
        self._writers["choice"] = lambda one: self._choice(one["choice"])
        self._writers["or"] = lambda one: self._or(one["elements"])
        self._as_lark = as_lark
        self._json_options = json_options
        self._quote = quote
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def grammar(self, tag: Format) -> str:
        """The whole grammar, as llguidance takes it."""
        start = self._rule(tag)
        lark = "\n".join([NO_FORCING, f"start: {start}", *self._rules])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *self._grammars]})

    def _named(self, body: str, mark: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {body}")
        return name

    def _token(self, name: str) -> str:
        return f"<[{self._ids[name]}]>"

    def _quoted(self, text: str) -> str:
        """Of the control characters JSON leaves one as it is, at which Lark stops."""
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    def _regex(self, one: Format) -> str:
        return f"/{self._quote(one['pattern'])}/"

    def _choice(self, texts: list[str]) -> str:
        """Write one expression: as alternatives of a rule, all of them would be looked at for every mask."""
        return self._regex({"pattern": "|".join(map(_escaped, texts))})

    def _or(self, elements: list[Format]) -> str:
        texts = [one["value"] for one in elements if one["type"] == "const_string"]
        are_plain = len(texts) == len(elements) and all(
            text and not self._has_special(text) for text in texts
        )
        return self._choice(texts) if are_plain else " | ".join(map(self._rule, elements))

    def _has_special(self, text: str) -> bool:
        return self._special is not None and self._special.search(text) is not None

    def _schema(self, one: Format) -> str:
        return "%json " + json.dumps(
            {**one["json_schema"], "x-guidance": self._json_options}, ensure_ascii=False
        )

    def _grammar(self, one: Format) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": self._as_lark(one["grammar"])})
        return f"@{name}"

    def _triggered(self, one: Format) -> str:
        """Free text runs up to the first trigger, and from there on a tag goes on as its trigger began."""
        excluded = [*one["triggers"], *one.get("excludes", [])]
        free = self._free(excluded, one.get("not_first", ""))
        first = later = self._turns(one, excluded, one.get("not_first", ""))
        tail = free
        if one.get("not_first"):
            later, tail = self._turns(one, excluded), self._free(excluded)
        many = first if one["stop_after_first"] else f"{first} {later}* {tail}"
        return many if one["at_least_one"] else f"{many} | {free}"

    def _turns(self, one: Format, excluded: list[str], not_first: str = "") -> str:
        turns = [self._turn(trigger, one["tags"], excluded, not_first) for trigger in one["triggers"]]
        return self._named(" | ".join(turns))

    def _turn(self, trigger: str, tags: list[Format], excluded: list[str], not_first: str) -> str:
        rests = self._rests(trigger, tags)
        if not rests:
            return self._named("/[^\\s\\S]/")
        return f"{self._begun(trigger, excluded, not_first)} {self._named(' | '.join(rests))}"

    def _begun(self, trigger: str, excluded: list[str], not_first: str) -> str:
        """Free text and the trigger."""
        head = self._before_special(trigger)
        if not head:
            return f"{self._free(excluded, not_first)} {self._literal(trigger)}"
        others = [text for text in excluded if text != trigger]
        text = self._terminal(f"(?s:.)*{_escaped(head)}", others, not_first)
        return f"{self._named(text, '[lazy]')} {self._literal(trigger[len(head) :])}"

    def _free(self, excluded: list[str], not_first: str = "") -> str:
        """Text that holds none of these."""
        return self._terminal("(?s:.)*", excluded, not_first)

    def _terminal(self, pattern: str, excluded: list[str], not_first: str = "") -> str:
        """What matches, holds none of these texts, and does not begin with one of those characters."""
        bad = [f"(?s:.)*(?:{'|'.join(map(_escaped, excluded))})(?s:.)*"] if excluded else []
        if not_first:
            bad.append(rf"\s*[{_escaped(not_first)}](?s:.)*")
        name = f"T{len(self._rules)}"
        self._rules.append(
            f"{name}: /{self._quote(pattern)}/" + "".join(f" & ~/{self._quote(one)}/" for one in bad)
        )
        return name

    def _until(self, one: Format) -> str:
        """One token of the grammar, so that nobody has to know where the text ends before its end is there."""
        head = self._before_special(one["end"])
        if not head:
            return f"{self._terminal(one['pattern'], [one['end']])} {self._literal(one['end'])}"
        name = f"T{len(self._rules)}"
        whole, early = f"(?:{one['pattern']}){_escaped(head)}", f"(?s:.)*{_escaped(head)}(?s:.)+"
        self._rules.append(f"{name}: /{self._quote(whole)}/ & ~/{self._quote(early)}/")
        return f"{self._named(name, '[lazy]')} {self._literal(one['end'][len(head) :])}"


def _escaped(text: str) -> str:
    """A text as an expression that it matches."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)
