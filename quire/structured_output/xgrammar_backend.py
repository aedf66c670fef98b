# SPDX-License-Identifier: Apache-2.0
"""Grammar backend on xgrammar (https://github.com/mlc-ai/xgrammar): context-free grammars over bytes and tokens.

Invariant: the library gets only grammars written here (`ebnf`), no schemas or expressions: its own conversion accepts
texts that they forbid. It bounds neither the work of a mask nor that of compiling, which grows with the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xgrammar

from quire.structured_output.backend import DEAD_END, Grammar, GrammarBackend, GrammarError, Masks, Matcher
from quire.structured_output.ebnf.constraints import ebnf_of
from quire.structured_output.ebnf.expressions import refusal
from quire.structured_output.vocabulary import LongestTokens
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary

MAX_REASON_CHARS = 300
PLACE = re.compile(r"^\[[\d:]+\] \S+: (?:Check failed: .* is false: )?")
NO_TEXT = b"\xff"  # prefix for names of tokens without text; no character contains this byte


class XGrammarBackend(GrammarBackend):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokens = _MatcherVocabulary(vocabulary)
        info = xgrammar.TokenizerInfo(
            self._tokens.names,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=[*vocabulary.ends],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        try:
            text = ebnf_of(params, self.vocabulary.special, self.vocabulary.ends)
        except RecursionError as error:
            raise GrammarError("it is nested too deeply") from error
        with library_errors():
            return _XGrammar(self._compiler.compile_grammar(text), self._tokens, has_tokens="Token(" in text)

    def matches_beyond(self, pattern: str, bound: str) -> bool:
        raise refusal("a whitespace_pattern")  # the library has no difference of expressions


class _MatcherVocabulary:
    """Facts about a vocabulary that its matchers need."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.names = [*vocabulary.tokens]
        for name, token_id in vocabulary.special.items():
            self.names[token_id] = NO_TEXT + name.encode()
        self.ends = frozenset(vocabulary.ends)
        for token_id in self.ends:
            self.names[token_id] = self.names[token_id] or NO_TEXT
        self.longest = LongestTokens(vocabulary.tokens)
        self.size = len(vocabulary.tokens)
        everything = Masks(1, self.size)
        everything.set_only(0, (token_id for token_id in range(self.size) if token_id not in self.ends))
        self.no_ends = everything.words[0]


class _XGrammar(Grammar):
    """Compiled grammar; its matchers share no bounded states."""

    def __init__(self, compiled: Any, tokens: _MatcherVocabulary, *, has_tokens: bool) -> None:
        self._compiled = compiled
        self._tokens = tokens
        self._has_tokens = has_tokens

    def new_matcher(self, *, shared: bool = True) -> Matcher:
        with library_errors():
            return _XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._tokens, self._has_tokens)


class _XGrammarMatcher(Matcher):
    def __init__(self, matcher: Any, tokens: _MatcherVocabulary, has_tokens: bool) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._has_tokens = has_tokens

    def fill(self, masks: Masks, place: int) -> None:
        if not self._fill(masks, place) and not self.may_end:
            raise GrammarError(DEAD_END)

    def _fill(self, masks: Masks, place: int) -> bool:
        """Write the mask; return whether any token but end tokens is allowed."""
        with library_errors():
            self._matcher.fill_next_token_bitmask(masks.words, place)
        return bool(np.any(masks.words[place] & self._tokens.no_ends))

    def advance(self, token_id: int) -> bool:
        with library_errors():
            return token_id not in self._tokens.ends and bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        with library_errors():
            self._matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return self.may_end and not self._fill(Masks(1, self._tokens.size), 0)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced_tokens(self) -> list[int]:
        """Return the forced tokens; none if the grammar names special tokens, which the library ignores here."""
        if self._has_tokens:
            return []
        with library_errors():
            return self._tokens.longest(self._forced_bytes())

    def _forced_bytes(self) -> bytes:
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # it begins or ends within a character
            return bytes(error.object)


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn what the library raises into GrammarError."""
    try:
        yield
    except Exception as error:
        raise GrammarError(" ".join(PLACE.sub("", str(error)).split())[:MAX_REASON_CHARS]) from error
