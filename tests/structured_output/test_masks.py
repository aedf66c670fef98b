# SPDX-License-Identifier: Apache-2.0
"""Masks against a slow engine of our own, over every token of vocabularies of all kinds."""

from __future__ import annotations

import random
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.tokenizer_cache import vocabulary_of
from quire.structured_output.backend import GrammarBackend, GrammarError, Masks, Matcher
from quire.structured_output.backends import BACKENDS
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary
from tests.engine.tokenizer_kinds import EOS, KINDS, Kind
from tests.fixtures.folded import folded
from tests.structured_output.reference_grammar import (
    Regex,
    Written,
    after,
    allowed,
    either,
    expressions,
    matches_empty,
    text,
)

BYTEWISE = [name for name in KINDS if Kind(name).tokenizer.is_bytewise]
ALPHABET = ["a", "b", "the", "é", "日本", " a", ".", "<0x", " "]


def vocabulary(name: str) -> Vocabulary:
    kind = Kind(name)
    return vocabulary_of(kind.tokenizer, kind.num_ids + 3, [kind.backend.token_to_id(EOS)])


VOCABULARIES = {name: vocabulary(name) for name in BYTEWISE}
LIBRARIES = {name: BACKENDS.resolve(name) for name in ("guidance", "xgrammar")}
with_each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


@cache
def made(library: type[GrammarBackend], name: str) -> GrammarBackend:
    return library(VOCABULARIES[name])


def bits(backend: GrammarBackend, matcher: Matcher) -> set[int]:
    size = len(backend.vocabulary.tokens)
    masks = Masks(1, size)
    matcher.fill(masks, 0)
    return {token_id for token_id in range(size) if masks.allows(0, token_id)}


def expected(backend: GrammarBackend, regex: Regex, so_far: bytes) -> set[int]:
    found = allowed(regex, so_far, backend.vocabulary.tokens)
    return found | set(backend.vocabulary.ends) if matches_empty(after(regex, so_far)) else found


def check_walk(backend: GrammarBackend, regex: Regex, matcher: Matcher, rng: random.Random) -> None:
    """At every place of a random text the mask is what the slow engine says, also after a step forth and back."""
    so_far: list[int] = []
    for _ in range(8):
        data = b"".join(backend.vocabulary.tokens[token_id] for token_id in so_far)
        wanted = expected(backend, regex, data)
        assert matcher.may_end == matches_empty(after(regex, data))
        if not wanted - set(backend.vocabulary.ends):
            return  # complete, or without a token for what must come, for which there is an error and no mask
        assert bits(backend, matcher) == wanted
        wrong, right = rng.choices(sorted(wanted - set(backend.vocabulary.ends)), k=2)
        assert matcher.advance(wrong)
        matcher.rollback(1)
        assert matcher.advance(right)
        so_far.append(right)


@with_each_library
@folded("name", BYTEWISE)
@settings(derandomize=True, max_examples=20, deadline=None)
@given(written=expressions(ALPHABET), seed=st.integers(0, 2**32))
def test_a_mask_has_the_tokens_with_which_some_match_begins(
    library: type[GrammarBackend], name: str, written: Written, seed: int
) -> None:
    backend = made(library, name)
    pattern, regex = written
    matcher = backend.compile(StructuredOutputsParams(regex=pattern)).new_matcher()
    check_walk(backend, regex, matcher, random.Random(seed))


@with_each_library
@settings(derandomize=True, max_examples=40, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_a_choice_allows_the_beginnings_of_its_texts(
    library: type[GrammarBackend], choices: list[str], seed: int
) -> None:
    backend = made(library, "byte_level")
    regex = text(choices[0])
    for choice in choices[1:]:
        regex = either(regex, text(choice))
    matcher = backend.compile(StructuredOutputsParams(choice=choices)).new_matcher()
    check_walk(backend, regex, matcher, random.Random(seed))


@with_each_library
@settings(derandomize=True, max_examples=60, deadline=None)
@given(written=expressions(ALPHABET), data=st.lists(st.integers(0, 255), max_size=6))
def test_disallowed_token_leaves_the_matcher_unchanged(
    library: type[GrammarBackend], written: Written, data: list[int]
) -> None:
    backend = library(Vocabulary.from_bytes())
    pattern, regex = written
    matcher = backend.compile(StructuredOutputsParams(regex=pattern)).new_matcher()
    so_far = b""
    for byte in data:
        wanted = byte in allowed(regex, so_far, backend.vocabulary.tokens)
        assert matcher.advance(byte) == wanted
        so_far += bytes([byte]) if wanted else b""
    assert matcher.may_end == matches_empty(after(regex, so_far))


@with_each_library
def test_forced_tokens_spell_the_forced_text(library: type[GrammarBackend]) -> None:
    backend = made(library, "byte_level")
    tokens = backend.vocabulary.tokens
    matcher = backend.compile(StructuredOutputsParams(regex="the (?:a|b)")).new_matcher()
    forced = matcher.forced_tokens()
    assert b"".join(tokens[token_id] for token_id in forced) == b"the "
    assert all(map(matcher.advance, forced))
    assert matcher.forced_tokens() == []


@with_each_library
def test_matchers_of_one_grammar_do_not_disturb_each_other(library: type[GrammarBackend]) -> None:
    backend = library(Vocabulary.from_bytes())
    grammar = backend.compile(StructuredOutputsParams(regex="(?:ab|cd)*e"))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    assert first.advance(ord("a"))
    assert bits(backend, second) == {ord("a"), ord("c"), ord("e")}
    assert bits(backend, first) == {ord("b")}
    assert second.advance(ord("e"))
    assert second.is_complete
    assert not first.is_complete


@with_each_library
@pytest.mark.parametrize("name", BYTEWISE)
def test_text_of_allowed_tokens_matches_the_grammar(library: type[GrammarBackend], name: str) -> None:
    """Through the tokenizer's own decoder: what a client reads matches."""
    kind, backend, rng = Kind(name), made(library, name), random.Random(7)
    pattern = "a(?: the|b|[.]| a| <0x4>| ?日本)*[.]"
    before = kind.backend.token_to_id("a")
    for _ in range(30):
        matcher = backend.compile(StructuredOutputsParams(regex=pattern)).new_matcher()
        ids = [before]
        while not matcher.may_end or rng.random() < 0.5:
            try:
                wanted = sorted(bits(backend, matcher) - set(backend.vocabulary.ends))
            except GrammarError:  # no token has what must come next
                assert not all(bytes([byte]) in backend.vocabulary.tokens for byte in range(128))
                break
            if not wanted:
                break
            ids.append(rng.choice(wanted))
            assert matcher.advance(ids[-1])
        shown = kind.tokenizer.decode(ids, skip_special_tokens=True)
        if matcher.may_end:
            assert re.fullmatch("a" + pattern, shown), (ids, shown)
