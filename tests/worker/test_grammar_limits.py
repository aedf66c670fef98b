# SPDX-License-Identifier: Apache-2.0
"""Large constraints are refused before anything is generated, or generated to the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import ValidationError
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured_output.backend import Masks
from quire.structured_output.checker import Checker
from quire.structured_output.normalize import normalize
from quire.structured_output.store import GrammarStore
from quire.structured_output.worker.grammar import ConstrainedText
from quire.structured_outputs_params import StructuredOutputsSettings
from quire.vocabulary import BYTES_END, Vocabulary
from tests.worker.harness import request

SETTINGS = StructuredOutputsSettings(compile_timeout_s=120.0)
VOCABULARY = Vocabulary.from_bytes()
VOCAB = len(VOCABULARY.tokens)
MAX_STEPS = 60
WAIT_S = 120.0

Words = list[str]


def lark(words: Words) -> str:
    return " | ".join(f'"{word}"' for word in words)


def const(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


FAMILIES: dict[str, Callable[[Words], dict[str, Any]]] = {
    "choice": lambda words: {"choice": words},
    "open object": lambda words: {"json": {"type": "object", "properties": {word: {} for word in words}}},
    "closed object": lambda words: {
        "json": {
            "type": "object",
            "properties": {word: {"type": "null"} for word in words},
            "additionalProperties": False,
        }
    },
    "any value": lambda words: {"json": {"properties": {word: {} for word in words}}},
    "inner object": lambda words: {
        "json": {
            "type": "array",
            "items": {"type": "object", "properties": {word: {"type": "null"} for word in words}},
            "minItems": 1,
        }
    },
    "enum": lambda words: {"json": {"enum": words}},
    "anyOf": lambda words: {"json": {"anyOf": [{"const": word} for word in words]}},
    "alternatives of Lark": lambda words: {"grammar": f"start: {lark(words)}"},
    "list of Lark": lambda words: {"grammar": f'start: (e ",")* e\ne: {lark(words)}'},
    "alternatives of GBNF": lambda words: {"grammar": f"root ::= {lark(words)}"},
    "expression": lambda words: {"regex": "|".join(words)},
    "tag": lambda words: {
        "structural_tag": {
            "type": "structural_tag",
            "format": {"type": "or", "elements": [const(word) for word in words]},
        }
    },
}
REPORTED = [("choice", 2000), ("choice", 4096), ("open object", 500), ("closed object", 1500)]
REPORTED += [("alternatives of Lark", 1980), ("enum", 3500)]
BEYOND = [("any value", 4096), ("open object", 3900), ("choice", 20_000)]


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    made = Checker(SETTINGS)
    yield made
    made.close()


def words_of(rng: random.Random, number: int) -> Words:
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(rng.choices("abcdefghijklmnop", k=rng.randint(4, 7)))] = None
    return list(found)


def checked(checker: Checker, family: str, words: Words) -> StructuredOutputsParams:
    with checker.turns.take("") as turn:
        turn.granted.result(WAIT_S)
        return checker.checked(normalize(StructuredOutputsParams(**FAMILIES[family](words)), SETTINGS), turn)


def generate(params: StructuredOutputsParams, rng: random.Random) -> None:
    """Sample at random among what is allowed."""
    # Time differs among machines, and the budget has tests of its own.
    grammars = GrammarStore(SETTINGS, limits_time=False)
    grammars.use_vocabulary(lambda: VOCABULARY)
    one = request([1], SamplingParams(structured_outputs=params), output=b"", eos_token_ids=[BYTES_END])
    text, unread = ConstrainedText(one, grammars, VOCAB), list[int]()
    for _ in range(MAX_STEPS):
        masks = Masks(1, VOCAB)
        filled = text.fill(masks, 0, unread)
        assert filled.failure is None
        unread = [rng.choice([token for token in range(VOCAB) if masks.allows(0, token)])]
        if unread == [BYTES_END]:
            return


@settings(derandomize=True, max_examples=40, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), number=st.integers(1, 4096), seed=st.integers(0, 2**32))
@example(family="open object", number=2000, seed=1)
@example(family="inner object", number=1200, seed=2)
def test_large_constraint_is_refused_or_generated(
    checker: Checker, family: str, number: int, seed: int
) -> None:
    rng = random.Random(seed)
    words, refusals = words_of(rng, number), list[str]()
    try:
        params = checked(checker, family, words)
    except ValidationError as error:
        refusals.append(error.message)
    else:
        generate(params, rng)
    assert all("the limit is" in refusal for refusal in refusals)


@pytest.mark.parametrize(("family", "number"), REPORTED)
def test_reported_constraint_is_generated(checker: Checker, family: str, number: int) -> None:
    rng = random.Random(number)
    generate(checked(checker, family, words_of(rng, number)), rng)


@pytest.mark.parametrize(("family", "number"), BEYOND)
def test_constraint_beyond_a_limit_is_refused_with_it(checker: Checker, family: str, number: int) -> None:
    with pytest.raises(ValidationError, match=r"\d+ .*the limit is \d+") as error:
        checked(checker, family, words_of(random.Random(number), number))
    assert str(error.value.param).startswith("structured_outputs.")
