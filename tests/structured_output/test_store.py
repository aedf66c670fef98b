# SPDX-License-Identifier: Apache-2.0
"""Compiled grammars are kept within a number of bytes, and compiled off the caller's thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quire.structured_output.backend import GrammarError
from quire.structured_output.store import GrammarStore
from quire.structured_outputs_params import MiB, StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary


def store(**settings: int) -> GrammarStore:
    made = GrammarStore(StructuredOutputsSettings(**settings))
    made.use_vocabulary(Vocabulary.from_bytes)
    return made


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.item(14)
def test_very_many_small_grammars_stay_within_their_bytes() -> None:
    grammars = store(cache_mb=8)
    for number in range(100):
        grammars.matcher(StructuredOutputsParams(json={"const": f"{number}"}, whitespace_pattern=""))
    before = resident_bytes()
    for number in range(800):
        grammars.matcher(StructuredOutputsParams(json={"enum": [f"{number}", 1]}, whitespace_pattern=""))
        assert grammars.num_bytes <= 8 * MiB
    assert resident_bytes() - before < 32 * MiB


def test_last_used_grammars_are_kept() -> None:
    grammars = store(cache_mb=1)
    grammars.matcher(regex("a"))
    for number in range(20):
        assert grammars.prepare(regex("a")).done()
        grammars.matcher(regex("b" * (number + 1)))
    assert grammars._find(regex("b").key) is None
    grammars.close()


def test_a_grammar_is_compiled_by_another_thread() -> None:
    started, goes_on = threading.Event(), threading.Event()

    def slow() -> Vocabulary:
        started.set()
        assert goes_on.wait(60)
        return Vocabulary.from_bytes()

    grammars = GrammarStore(StructuredOutputsSettings())
    grammars.use_vocabulary(slow)
    future = grammars.prepare(regex("a"))
    assert started.wait(60)
    assert not future.done()
    goes_on.set()
    future.result(60)
    assert grammars.prepare(regex("a")).done()
    assert grammars.matcher(regex("a")).advance(ord("a"))
    grammars.close()


def test_uncompilable_grammar_is_ready_with_its_error() -> None:
    grammars = store()
    grammars.prepare(regex("(")).result(60)
    assert grammars.prepare(regex("(")).done()
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group"):
            grammars.matcher(regex("("))
    grammars.close()


def test_a_renewed_grammar_is_compiled_again() -> None:
    grammars = store()
    first = grammars.matcher(regex("ab"))
    num_bytes = grammars.num_bytes
    grammars.renew(regex("ab"))
    assert grammars.num_bytes == 0
    assert first.advance(ord("a"))
    assert grammars.matcher(regex("ab")).advance(ord("a"))
    assert grammars.num_bytes == num_bytes
