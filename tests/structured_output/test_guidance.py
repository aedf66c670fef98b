# SPDX-License-Identifier: Apache-2.0
"""Tests of library failures, which become errors of quire for one grammar."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.structured_output.backend import GrammarError, Masks, Matcher
from quire.structured_output.guidance import LIMITS, GuidanceBackend, grammar_error
from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary


class PanicException(BaseException):
    """Stand-in for a panic of a Rust library."""


class BrokenMatcher:
    """Everything about it raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


@pytest.mark.parametrize(
    "error", [PanicException("index out of bounds"), ValueError("bad"), RecursionError()]
)
def test_a_failure_of_the_library_is_a_grammar_error(error: BaseException) -> None:
    matcher = (
        GuidanceBackend(Vocabulary.from_bytes()).compile(StructuredOutputsParams(regex="a")).new_matcher()
    )
    matcher._matcher = BrokenMatcher(error)  # type: ignore[attr-defined]
    for use in (
        lambda: matcher.fill(Masks(1, 257), 0),
        lambda: matcher.advance(1),
        lambda: matcher.rollback(1),
    ):
        with pytest.raises(GrammarError):
            use()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_other_errors_are_raised_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)):
        grammar_error(error)


def write(matcher: Matcher, text: list[int]) -> None:
    for byte in text:
        matcher.fill(Masks(1, 257), 0)
        assert matcher.advance(byte)


def test_lexer_with_too_many_states_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a matcher of its own may have fewer."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 1000)
    backend = GuidanceBackend(Vocabulary.from_bytes())
    grammar = backend.compile(StructuredOutputsParams(regex=".*a.{25}"))
    rng, matcher = random.Random(1), grammar.new_matcher()
    with pytest.raises(GrammarError) as error:
        write(matcher, rng.choices(b"ab", k=100_000))
    assert error.value.exhausted
    alone = grammar.new_matcher(shared=False)
    alone.fill(Masks(1, 257), 0)
