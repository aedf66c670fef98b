"""The backend on llguidance (https://github.com/guidance-ai/llguidance): derivatives for lexemes, Earley above them.

Invariant: what a token's bytes are comes from our vocabulary and not from the library's own reading of a tokenizer.
Every limit of the library is set here; it bounds the work of one mask, and its states, by counting and not by time.
The limits of the parser grow with the text of a grammar, because an alternative is an item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from quire.structured_output.backend import (
    DEAD_END,
    Grammar,
    GrammarBackend,
    GrammarError,
    Masks,
    Matcher,
)
from quire.structured_output.lark import NO_FORCING, lark_of
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.tag_writer import format_of
from quire.structured_output.vocabulary import LongestTokens, Vocabulary

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""The states of a grammar take some 60 MB (each is a row of 256 numbers)."""
BASE_ITEMS = 2_000
ITEMS_PER_BYTE = 0.5  # an optional property takes at least 8 bytes of schema, and 4 items
MOST_ITEMS = 8_192  # a row takes time with their square, 10 ms for so many, and 8 bytes of memory for each
ROWS_PER_MASK = 25  # rows of that size that one mask may compute
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
    """See `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokens = _Tokens(vocabulary)
        wrapper: Any = self._tokens
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(vocabulary.ends))

    def prepare(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """A grammar of llama.cpp becomes one of Lark."""
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
    """A matcher at the start, which others are copies of: they share the states of its lexer."""

    def __init__(self, tokens: _Tokens, tokenizer: Any, text: str) -> None:
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
    """See `Matcher`. What the library says after an error is not asked for."""

    def __init__(self, matcher: Any, tokens: _Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def fill(self, masks: Masks, place: int) -> None:
        matcher = self._matcher
        try:
            matcher.unsafe_compute_mask_ptr(masks.address(place), masks.num_bytes)
        except BaseException as error:
            raise of_library(error) from error
        if matcher.is_error():
            _check(matcher)

    def advance(self, token_id: int) -> bool:
        matcher = self._matcher
        try:
            is_allowed = bool(matcher.try_consume_tokens([token_id]) == 1)
        except BaseException as error:
            raise of_library(error) from error
        if not is_allowed:
            _check(matcher)  # a limit that was met reads like a token that is not allowed
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


class _Tokens:
    """A vocabulary in the shape in which the library asks for a tokenizer."""

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
        """How the library asks for the tokens of a text that is forced; see `NO_FORCING`."""
        return self.longest(text if isinstance(text, bytes) else text.encode())


def limits_of(text: str) -> dict[str, Any]:
    """Return the limits for a grammar of this text, as `LLParserLimits` takes them."""
    items = min(BASE_ITEMS + int(ITEMS_PER_BYTE * len(text.encode())), MOST_ITEMS)
    return {**LIMITS, "max_items_in_row": items, "step_max_items": ROWS_PER_MASK * items}


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn what the library raises into GrammarError."""
    try:
        yield
    except BaseException as error:
        raise of_library(error) from error


def of_library(error: BaseException) -> GrammarError:
    """What the library raised, as our own error. A panic is a BaseException of a class that it does not export.

    Raises:
        BaseException: it is not the library's.
    """
    if isinstance(error, RecursionError):
        return GrammarError("it is nested too deeply")
    if isinstance(error, Exception):
        return GrammarError(_reason(str(error)))
    if type(error).__name__ != "PanicException":
        raise error
    return GrammarError("the grammar library failed on it")


def _check(matcher: Any) -> None:
    """Raise GrammarError if the library gave up on a matcher."""
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise GrammarError(reason, exhausted=bool(EXHAUSTED.search(reason)))


def _reason(message: str) -> str:
    """The library's words as far as a client needs them: without our grammar around theirs, and its own options."""
    if message.startswith("NoExtension"):
        return DEAD_END
    if row := ROW.search(message):
        return f"{row[1]} ways to go on are possible at one place, the limit is {row[2]}"
    if rows := ROWS.search(message):
        return (
            f"finding the tokens that may come next takes more than {rows[1]} items of the parser, the limit"
        )
    if "oneOf constraints are not supported" in message:
        return "oneOf is supported only where the library can tell that no value fits two of its schemas"
    message = message.split("\n<state>")[0].split("\n<non-verbose/>")[0]
    message = EXPRESSION.sub("the expression is not supported: ", PLACE.sub("", message))
    message = EXCERPT.sub("", PARSE_ERROR.sub("", message))
    message = EMPTY.sub("no text is all of what it must be", COMPILER.sub("", message))
    message = message.replace("Unsatisfiable schema: ", "nothing fits it: ")
    return " ".join(message.split())[:MAX_REASON_CHARS]
