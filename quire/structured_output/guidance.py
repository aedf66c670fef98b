# SPDX-License-Identifier: Apache-2.0
"""Grammar backend on llguidance (https://github.com/guidance-ai/llguidance): derivatives for lexemes, Earley above.

Invariant: token bytes come from our vocabulary, not from the library's reading of a tokenizer. All limits of the
library are set here. They bound the work of a mask and its states by counts, not by time. Parser limits grow with the
grammar's text, because an alternative is an item. Grammars are built from quoted pieces only, so nothing in a
structural tag can be read as a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from quire.json_schema.structural_tag import Format, TagWriter, format_of
from quire.structured_output.backend import DEAD_END, Grammar, GrammarBackend, GrammarError, Masks, Matcher
from quire.structured_output.vocabulary import LongestTokens
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Allows every tokenization of forced text, not only the library's preferred one."""


def lark_of(
    tag: Format,
    json_options: dict[str, Any],
    special: Mapping[str, int],
    quote: Callable[[str], str],
    as_lark: Callable[[str], str],
) -> str:
    """Return the llguidance grammar of a normalized structural tag.

    Args:
        json_options: options of its schemas ("x-guidance").
        special: literals of special tokens, as texts name them -> ids.
        quote: quotes an expression for use between slashes.
        as_lark: converts a grammar to Lark.
    """
    return _GuidanceWriter(json_options, special, quote, as_lark).grammar(tag)


class _GuidanceWriter(TagWriter):
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
        """Return the whole grammar, as llguidance takes it."""
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
        """Quote a text; JSON leaves the control character DEL as it is, which Lark rejects."""
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    def _regex(self, one: Format) -> str:
        return f"/{self._quote(one['pattern'])}/"

    def _choice(self, texts: list[str]) -> str:
        """Write one expression; alternatives of a rule would all be tried for every mask."""
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
        """Write free text up to the first trigger, followed by a tag that starts with it."""
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
        """Write free text and the trigger."""
        head = self._before_special(trigger)
        if not head:
            return f"{self._free(excluded, not_first)} {self._literal(trigger)}"
        others = [text for text in excluded if text != trigger]
        text = self._terminal(f"(?s:.)*{_escaped(head)}", others, not_first)
        return f"{self._named(text, '[lazy]')} {self._literal(trigger[len(head) :])}"

    def _free(self, excluded: list[str], not_first: str = "") -> str:
        """Write text without the excluded texts."""
        return self._terminal("(?s:.)*", excluded, not_first)

    def _terminal(self, pattern: str, excluded: list[str], not_first: str = "") -> str:
        """Write text that matches, without the excluded texts, not starting with the given characters."""
        bad = [f"(?s:.)*(?:{'|'.join(map(_escaped, excluded))})(?s:.)*"] if excluded else []
        if not_first:
            bad.append(rf"\s*[{_escaped(not_first)}](?s:.)*")
        name = f"T{len(self._rules)}"
        self._rules.append(
            f"{name}: /{self._quote(pattern)}/" + "".join(f" & ~/{self._quote(one)}/" for one in bad)
        )
        return name

    def _until(self, one: Format) -> str:
        """Write the text as one lexeme, so that its end need not be known before it is complete."""
        head = self._before_special(one["end"])
        if not head:
            return f"{self._terminal(one['pattern'], [one['end']])} {self._literal(one['end'])}"
        name = f"T{len(self._rules)}"
        whole, early = f"(?:{one['pattern']}){_escaped(head)}", f"(?s:.)*{_escaped(head)}(?s:.)+"
        self._rules.append(f"{name}: /{self._quote(whole)}/ & ~/{self._quote(early)}/")
        return f"{self._named(name, '[lazy]')} {self._literal(one['end'][len(head) :])}"


def _escaped(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""A grammar's lexer states take up to about 60 MB (each is a row of 256 numbers)."""
BASE_ITEMS = 2_000
ITEMS_PER_BYTE = 0.5  # an optional property takes at least 8 bytes of schema, and 4 items
MOST_ITEMS = 8_192  # time per row is quadratic in them, 10 ms for so many; memory is 8 bytes each
ROWS_PER_MASK = 25  # most rows of that size computed for one mask
MAX_REASON_CHARS = 300
PLACE = re.compile(r"^at \d+\(\d+\): |^\d+\(\d+\): ")
PARSE_ERROR = re.compile(r"regex parse error:.*error: ", re.DOTALL)
EXPRESSION = re.compile(r'invalid regex ".*" \(in regex\): ', re.DOTALL)
EXCERPT = re.compile(r"(?m)^ *\d+ \| .*$|^ *\^+ *$")
COMPILER = re.compile(r"failed to compile JSON schema: | while processing json-schema:\S*")
EMPTY = re.compile(r"Regex is empty: .*", re.DOTALL)
EXHAUSTED = re.compile("(?i)fuel|too (big|complex)|states")
ROW = re.compile(r"Current row has (\d+) items; max is (\d+)")
ROWS = re.compile(r"Too many items \(limit (\d+)")


class GuidanceBackend(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokens = _TokenizerTokens(vocabulary)
        wrapper: Any = self._tokens
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(vocabulary.ends))

    def prepare(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Convert a llama.cpp grammar to Lark."""
        if params.grammar is None:
            return params
        with library_errors():
            return StructuredOutputsParams(grammar=any_to_lark(params.grammar))

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        options = {"whitespace_pattern": params.whitespace_pattern, "lenient": False, "coerce_one_of": False}
        special, quote = self.vocabulary.special, llguidance.regex_to_lark
        with library_errors():
            text = lark_of(format_of(params), options, special, quote, any_to_lark)
        return _GuidanceGrammar(self._tokens, self._tokenizer, text)

    def matches_beyond(self, pattern: str, bound: str) -> bool:
        inside, outside = map(llguidance.regex_to_lark, (pattern, bound))
        text = f"{NO_FORCING}\nstart: X\nX: /{inside}/ & ~/{outside}/"
        matcher = _GuidanceGrammar(self._tokens, self._tokenizer, text).new_matcher()
        try:
            matcher.fill(Masks(1, len(self.vocabulary.tokens)), 0)
        except GrammarError:
            return False
        return True


class _GuidanceGrammar(Grammar):
    """Compiled grammar: a matcher at the start, whose copies share the lexer states."""

    def __init__(self, tokens: _TokenizerTokens, tokenizer: Any, text: str) -> None:
        limits = llguidance.LLParserLimits(**limits_of(text))
        self._tokens = tokens
        self._make: Callable[[], Any] = lambda: llguidance.LLMatcher(
            tokenizer, text, log_level=0, limits=limits
        )
        with library_errors():
            self._first = self._make()
        _check(self._first)

    def new_matcher(self, *, shared: bool = True) -> Matcher:
        with library_errors():
            return _GuidanceMatcher(self._first.deep_copy() if shared else self._make(), self._tokens)


class _GuidanceMatcher(Matcher):
    """`Matcher` of the library, which is not queried after an error."""

    def __init__(self, matcher: Any, tokens: _TokenizerTokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def fill(self, masks: Masks, place: int) -> None:
        matcher = self._matcher
        try:
            matcher.unsafe_compute_mask_ptr(masks.address(place), masks.num_bytes)
        except BaseException as error:
            raise grammar_error(error) from error
        if matcher.is_error():
            _check(matcher)

    def advance(self, token_id: int) -> bool:
        matcher = self._matcher
        try:
            is_allowed = bool(matcher.try_consume_tokens([token_id]) == 1)
        except BaseException as error:
            raise grammar_error(error) from error
        if not is_allowed:
            _check(matcher)  # a limit that is hit looks like a disallowed token
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        with library_errors():
            self._matcher.rollback(num_tokens)
        _check(self._matcher)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def forced_tokens(self) -> list[int]:
        with library_errors():
            forced = self._matcher.compute_ff_bytes()
        _check(self._matcher)
        return self._tokens.longest(forced)


class _TokenizerTokens:
    """Vocabulary in the form of the library's tokenizer wrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token_id: name.encode() for name, token_id in vocabulary.special.items()}
        self.eos_token_id = vocabulary.ends[0]
        self.tokens = [names.get(token_id, token) for token_id, token in enumerate(vocabulary.tokens)]
        for token_id in vocabulary.ends:
            self.tokens[token_id] = self.tokens[token_id] or f"<end {token_id}>".encode()
        self.special_token_ids = sorted({*names, *vocabulary.ends})
        self.longest = LongestTokens(vocabulary.tokens)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a forced text for the library; see `NO_FORCING`."""
        return self.longest(text if isinstance(text, bytes) else text.encode())


def limits_of(text: str) -> dict[str, Any]:
    """Return the `LLParserLimits` arguments for a grammar of this text."""
    items = min(BASE_ITEMS + int(ITEMS_PER_BYTE * len(text.encode())), MOST_ITEMS)
    return {**LIMITS, "max_items_in_row": items, "step_max_items": ROWS_PER_MASK * items}


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn what the library raises into GrammarError."""
    try:
        yield
    except BaseException as error:
        raise grammar_error(error) from error


def grammar_error(error: BaseException) -> GrammarError:
    """Convert an error of the library; a panic is a BaseException of a class that it does not export.

    Raises:
        BaseException: the error is not from the library.
    """
    if isinstance(error, RecursionError):
        return GrammarError("it is nested too deeply")
    if isinstance(error, Exception):
        return GrammarError(_reason(str(error)))
    if type(error).__name__ != "PanicException":
        raise error
    return GrammarError("the grammar library crashed on it")


def _check(matcher: Any) -> None:
    """Raise GrammarError if the library gave up on a matcher."""
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise GrammarError(reason, exhausted=bool(EXHAUSTED.search(reason)))


def _reason(message: str) -> str:
    """Return the library's message without our wrapper grammar and its own options."""
    if message.startswith("NoExtension"):
        return DEAD_END
    if row := ROW.search(message):
        return f"{row[1]} parser items at one position; the limit is {row[2]}"
    if rows := ROWS.search(message):
        return f"computing the allowed tokens takes more than {rows[1]} parser items, the limit"
    if "oneOf constraints are not supported" in message:
        return "oneOf is supported only if the library can prove that no value matches two of its schemas"
    message = message.split("\n<state>")[0].split("\n<non-verbose/>")[0]
    message = EXPRESSION.sub("the expression is not supported: ", PLACE.sub("", message))
    message = EXCERPT.sub("", PARSE_ERROR.sub("", message))
    message = EMPTY.sub("no text meets all conditions", COMPILER.sub("", message))
    message = message.replace("Unsatisfiable schema: ", "no value matches it: ")
    return " ".join(message.split())[:MAX_REASON_CHARS]
