# SPDX-License-Identifier: Apache-2.0
"""Normalized constraints of every kind in xgrammar's EBNF."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quire.json_schema.ecma_regex import RegexError
from quire.json_schema.structural_tag import ANY, Format, TagWriter, format_of
from quire.structured_output.backend import GrammarError
from quire.structured_output.ebnf.expressions import Rules, Scanner, quoted, refusal, text_rule
from quire.structured_output.ebnf.schemas import SchemaWriter
from quire.structured_output.normalize import FLEXIBLE_SPACE, NO_SPACE
from quire.structured_outputs_params import StructuredOutputsParams

SPACES = {FLEXIBLE_SPACE: '(" " | "\\n" ([ ]{0,20} | [\\t]{0,10}))?', NO_SPACE: '""', None: '""'}
"""`whitespace_pattern` -> EBNF."""
QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*')
ADDED = re.compile(r"\(=|[A-Z]\w*\(")
"""Lookahead and macros, which may name any token."""


def ebnf_of(params: StructuredOutputsParams, special: Mapping[str, int], ends: Collection[int]) -> str:
    """Return the grammar of a normalized constraint, whose first rule is `root`.

    Args:
        special: literals of special tokens -> ids.
        ends: ids that end a text.

    Raises:
        GrammarError: it cannot be expressed in EBNF, or is not supported here.
    """
    if params.grammar is not None:
        return _llama(params.grammar)
    if params.whitespace_pattern not in SPACES:
        raise refusal("a whitespace_pattern")
    return _EbnfWriter(special, ends, SPACES[params.whitespace_pattern]).grammar(format_of(params))


class _EbnfWriter(TagWriter):
    def __init__(self, special: Mapping[str, int], ends: Collection[int], space: str) -> None:
        super().__init__(special)
        self._ends = ends
        self._rules = Rules()
        self._space = self._rules.define(space)

    def grammar(self, tag: Format) -> str:
        return self._rules.grammar(self._rule(tag))

    def _named(self, body: str) -> str:
        return self._rules.define(body)

    def _quoted(self, text: str) -> str:
        return quoted(text)

    def _token(self, name: str) -> str:
        if self._ids[name] in self._ends:
            raise refusal(f"{name} within a text, which it ends")
        return f"Token({self._ids[name]})"

    def _schema(self, one: Format) -> str:
        schema: Any = one["json_schema"]
        rule = SchemaWriter(schema, self._rules, self._space).rule(schema)
        if rule is None:
            raise GrammarError("no value validates")
        return rule

    def _regex(self, one: Format) -> str:
        return _expression(one["pattern"])

    def _grammar(self, one: Format) -> str:
        raise refusal("a grammar within a structural tag")

    def _free(self, excluded: list[str], not_first: str = "") -> str:
        return self._scanned(dict.fromkeys(excluded), [], may_end=True, not_first=not_first)

    def _until(self, one: Format) -> str:
        if one["pattern"] != ANY:
            raise refusal("an expression of the text up to an end")
        stops, anywhere = self._stops({one["end"]: '""'})
        return self._scanned(stops, anywhere, may_end=False)

    def _triggered(self, one: Format) -> str:
        """Write the automaton; after a tag it starts again, with any first character and perhaps no tag."""
        again = self._rules.reserve()
        after = '""' if one["stop_after_first"] else again
        rests = {trigger: self._rests(trigger, one["tags"]) for trigger in one["triggers"]}
        turns = {
            trigger: f"({' | '.join(map(self._named, some))}) {after}"
            for trigger, some in rests.items()
            if some
        }
        stops, anywhere = self._stops(turns)
        stops = {**dict.fromkeys((*one["triggers"], *one.get("excludes", ()))), **stops}
        Scanner(self._rules, stops, anywhere, may_end=True).rule(again)
        return self._scanned(
            stops, anywhere, may_end=not one["at_least_one"], not_first=one.get("not_first", "")
        )

    def _stops(self, turns: Mapping[str, str]) -> tuple[dict[str, str | None], list[str]]:
        """Return texts with what follows them, and continuations that start with a special token.

        The name of such a token spelled in letters looks the same and is excluded from free text.
        """
        stops: dict[str, str | None] = {}
        anywhere = []
        for text, rest in turns.items():
            head = self._before_special(text)
            tail = f"{self._literal(text[len(head) :])} {rest}"
            if head:
                stops[head] = tail
            else:
                stops[text] = None
                anywhere.append(tail)
        return stops, anywhere

    def _scanned(
        self, stops: Mapping[str, str | None], anywhere: list[str], *, may_end: bool, not_first: str = ""
    ) -> str:
        name = self._rules.reserve()
        Scanner(self._rules, stops, anywhere, may_end=may_end, not_first=not_first).rule(name)
        return name


def _expression(pattern: str) -> str:
    try:
        return text_rule(pattern)
    except RegexError as error:
        raise refusal(f"the expression: {error}") from None


def _llama(grammar: str) -> str:
    """Return a grammar as sent; the library parses it."""
    if "::=" not in grammar:
        raise refusal("grammars of Lark, but to llama.cpp's (root ::= ...)")
    if ADDED.search(QUOTED.sub("", grammar)):
        raise refusal("what it adds to llama.cpp's grammars")
    return grammar
