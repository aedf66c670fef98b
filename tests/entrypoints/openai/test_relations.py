# SPDX-License-Identifier: Apache-2.0
"""Tests of relations between request fields: the document states and the server enforces them, in any combination."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.entrypoints.openai.openapi.limits import _digits_below
from quire.entrypoints.openai.protocol.relations import NOT_IN_SEARCHES
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.relations import is_relation
from tests.entrypoints.openai.serving import client_for
from tests.entrypoints.openai.test_openapi import BODIES, body_validator, document
from tests.fixtures.folded import folded

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
FORMS: dict[str, list[Any]] = {
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "structured_outputs": [{"choice": ["a", "b"]}],
    "guided_json": [{"type": "object"}],
    "guided_regex": ["a+", ""],
    "guided_choice": [["a", "b"]],
    "json_schema": [{"type": "object"}],
    "regex": ["a+", "a\0"],
    "grammar": ["", "root ::= 'a'"],
    "guided_whitespace_pattern": [" ?"],
}
OF_GENERATION: dict[str, list[Any]] = FORMS | {
    "stream": [True, False, True],
    "stream_options": [{}, {"include_usage": True}],
    "use_beam_search": [True, True, False],
    "length_penalty": [1, 2.0],
    "early_stopping": [False, True, "never"],
    "n": [1, 2, 65],
    "prompt_logprobs": [0, 1],
    "logprob_token_ids": [[5]],
    "temperature": [0, 0.5, 1],
    "top_k": [-1, 0, 1],
    "stop": [[], ["x"]],
    "logit_bias": [{}, {"257": 1}, {"258": 1}, {"007": 1}],
    "stream_interval": [2],
    "vllm_xargs": [{}, {"a": 1}],
    "seed": [3],
    "max_tokens": [0, 1, 5],
}
FIELDS: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": OF_GENERATION
    | {
        "prompt": ["hi", ["hi", "ho"], [1, 2], ["hi", [1]]],
        "echo": [True, False, True],
        "logprobs": [0, 2],
        "best_of": [1, 3],
        "suffix": ["", "x", "x"],
    },
    "/v1/chat/completions": OF_GENERATION
    | {
        "logprobs": [True, False],
        "top_logprobs": [0, 2],
        "tools": [[], [TOOL], [STRICT]],
        "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
        "functions": [[], [TOOL["function"]], [STRICT["function"]]],
        "function_call": ["none", "auto", {"name": "f"}, {"name": "f", "more": 1}],
        "add_generation_prompt": [True, False],
        "continue_final_message": [True, False],
    },
    "/v1/responses": {
        "instructions": ["", "Be brief."],
        "input": [
            "",
            "hi",
            [{"type": "reasoning"}],
            [{"type": "reasoning", "content": [{"text": ""}]}],
            [{"type": "reasoning", "content": [{"text": "hm"}]}],
            [{"role": "user", "content": "hi"}],
        ],
        "top_logprobs": [0, 2],
        "include": [[], ["message.output_text.logprobs"]],
        "tools": [[], [{"type": "function", "name": "f"}]],
        "tool_choice": ["none", "auto", "required", {"type": "function", "name": "f"}],
        "text": [{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
        "structured_outputs": [{"choice": ["a"]}],
    },
    "/v1/messages": {
        "tools": [[], [{"name": "f", "input_schema": {"type": "object"}}]],
        "tool_choice": [{"type": one} for one in ("auto", "any", "none")] + [{"type": "tool", "name": "f"}],
        "stream": [True, False],
    },
    "/api/chat": {"logprobs": [True, False], "top_logprobs": [0, 2]},
    "/api/show": {"model": ["", "fake-model"], "name": ["", "fake-model"]},
}
NUM_BODIES = 120
FILLS_IN = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def bodies(path: str) -> Iterator[dict[str, Any]]:
    """Random ones of a few fields, each with a value that is fine by itself, or nearly."""
    rng, fields = random.Random(path), FIELDS[path]
    for _ in range(NUM_BODIES if len(fields) > 3 else 40):
        names = rng.sample(sorted(fields), rng.randint(1, min(5, len(fields))))
        required = {name: value for name, value in BODIES[path].items() if path != "/api/show"}
        yield required | {name: rng.choice([*fields[name], None]) for name in names}


@folded("path", list(FIELDS))
async def test_field_combinations_are_accepted_as_documented(path: str) -> None:
    validator = body_validator(document(), path)
    outcomes = set()
    async with client_for(FakeEngine()) as client:
        for body in bodies(path):
            response = await client.post(path, json=body)
            fits, taken = validator.is_valid(body), response.status_code == 200
            assert response.status_code in (200, 400), f"{body}: {response.text}"
            assert fits or not taken, f"{body} is taken"
            assert taken or not fits or is_relation(response.text, body), f"{body}: {response.text}"
            outcomes.add((fits, taken))
    assert {(True, True), (False, False)} <= outcomes


def test_samplers_are_refused_in_a_search_or_settings_of_one() -> None:
    settings = {
        "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
        "mirostat_eta", "mirostat_tau", "penalty_last_n", "repeat_last_n", "seed", "xtc_threshold",
    }  # fmt: skip
    assert set(SAMPLERS) - NOT_IN_SEARCHES.keys() == settings


def test_a_suffix_is_for_models_that_fill_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it needs prompts of text, and no echo."""
    assert not body_validator(document(), "/v1/completions").is_valid({"prompt": "hi", "suffix": "x"})
    ids = {name: 300 + index for index, name in enumerate(FILLS_IN)}
    monkeypatch.setattr(FakeTokenizer, "id_of", lambda tokenizer, token: ids.get(token))
    validator = body_validator(document(), "/v1/completions")
    for more, fits in (
        ({}, True),
        ({"echo": True}, False),
        ({"prompt": [1]}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"suffix": "", "echo": True}, True),
    ):
        assert validator.is_valid({"prompt": "hi", "suffix": "x", **more}) == fits, more


@folded("end", [1, 2, 10, 11, 258, 2048, 32000, 151936])
def test_digits_below_a_number_are_those_of_lower_ones(end: int) -> None:
    pattern = re.compile(_digits_below(end))
    rng = random.Random(end)
    numbers = {0, 1, 9, 10, end - 1, end, end + 1, end * 10, *(rng.randrange(end * 3) for _ in range(500))}
    for number in numbers:
        assert bool(pattern.fullmatch(str(number))) == (number < end), number
