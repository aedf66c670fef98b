# SPDX-License-Identifier: Apache-2.0
"""Constraints on the included model: every finished text satisfies its own, in any batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.outputs import CompletionOutput
from quire.sampling_params import StructuredOutputsParams
from quire.worker.model_runner import ModelRunner
from tests.structured_output.random_schemas import RandomSchemas

PROMPT = "Answer in the form that is asked for: "
REGEXES = [
    r"(?:\d{3}-){2}[a-f]+",
    r"[A-Z][a-z]+(?: [A-Z][a-z]+)?",
    r"(?:ab|cd)*e?",
    r"-?(?:0|[1-9]\d{0,5})(?:\.\d{1,3})?",
    r"\([^()]{0,8}\)",
    r"(?i:yes|no)[.!]?",
    r"日本|é+|\S{3}",
    r"[\w.]+@[\w]+\.(?:org|net)",
    r"(?s:.{5})",
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(max_num_seqs=32)
    yield made
    made.llm_engine.shutdown()


def generate(llm: LLM, constraints: list[dict[str, Any]], **options: Any) -> list[CompletionOutput]:
    """With seeds of their own, very random."""
    shared = {"temperature": 1.5, "max_tokens": 700} | options
    params = [
        SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), seed=seed, **shared)
        for seed, constraint in enumerate(constraints)
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def check_schemas(llm: LLM, count: int, seed: int) -> None:
    source = RandomSchemas(seed)
    schemas = [source.draw() for _ in range(count)]
    outputs = generate(llm, [{"json": schema} for schema in schemas])
    finished = [(o, schema) for o, schema in zip(outputs, schemas, strict=True) if o.finish_reason == "stop"]
    checker = jsonschema.FormatChecker(formats=["date", "uuid", "ipv4", "email"])  # those that it knows well
    for output, schema in finished:
        value = json.loads(output.text)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(finished) > 0.95 * count


@pytest.mark.more
def test_finished_texts_validate_against_random_schemas(llm: LLM) -> None:
    check_schemas(llm, 200, seed=1)


@pytest.mark.soak
def test_finished_texts_validate_against_many_random_schemas(llm: LLM) -> None:
    check_schemas(llm, 2000, seed=2)


def test_finished_texts_match_their_expressions(llm: LLM) -> None:
    patterns = REGEXES * 6
    outputs = generate(llm, [{"regex": pattern} for pattern in patterns], max_tokens=80)
    for output, pattern in zip(outputs, patterns, strict=True):
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), (pattern, output.text)
    assert sum(output.finish_reason == "stop" for output in outputs) > len(outputs) / 2


def test_a_choice_is_one_of_its_texts(llm: LLM) -> None:
    choice = ["Paris", "London", "Par", "no idea", "日本", 'a "b"\n']
    outputs = generate(llm, [{"choice": choice}] * 24)
    assert {output.text for output in outputs} <= set(choice)
    assert len({output.text for output in outputs}) > 1
    assert {output.finish_reason for output in outputs} == {"stop"}


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "yes" | "no" [0-9]{2} "."', 'start: "yes" | "no" /[0-9]{2}/ "."'],
    ids=["gbnf", "lark"],
)
def test_a_grammar_is_kept_to(llm: LLM, grammar: str) -> None:
    for output in generate(llm, [{"grammar": grammar}] * 8):
        assert re.fullmatch(r"yes|no\d\d\.", output.text)


def test_json_object_constraint_yields_an_object(llm: LLM) -> None:
    outputs = generate(llm, [{"json_object": True}] * 8, max_tokens=400)
    finished = [output for output in outputs if output.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(output.text), dict) for output in finished)


def test_spaces_come_to_an_end(llm: LLM) -> None:
    """However much the model would like to go on with them."""
    (space,) = llm.get_tokenizer().encode(" ", add_special_tokens=False)
    outputs = generate(llm, [{"json": CITY}] * 4, logit_bias={space: 100.0}, max_tokens=300)
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_json_without_spaces_can_be_requested(llm: LLM) -> None:
    for output in generate(llm, [{"json": CITY, "disable_any_whitespace": True}] * 8):
        assert output.text == json.dumps(json.loads(output.text), ensure_ascii=False, separators=(",", ":"))


def test_pieces_of_a_structural_tag_follow_each_other(llm: LLM) -> None:
    tag = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<a>"},
            {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
            {
                "type": "or",
                "elements": [{"type": "regex", "pattern": "x+"}, {"type": "const_string", "value": "y"}],
            },
        ],
    }
    for output in generate(llm, [{"structural_tag": tag}] * 8, max_tokens=100):
        if output.finish_reason == "stop":
            assert re.fullmatch(r"<a>[12](?:x+|y)", output.text)


def test_free_text_goes_on_until_a_trigger(llm: LLM) -> None:
    tag = {
        "structures": [{"begin": "<f=one>", "schema": {"enum": [1]}, "end": "</f>"}],
        "triggers": ["<f="],
        "type": "structural_tag",
    }
    bias = {llm.get_tokenizer().encode("<", add_special_tokens=False)[0]: 6.0}
    outputs = generate(llm, [{"structural_tag": tag}] * 16, max_tokens=60, logit_bias=bias)
    texts = [output.text for output in outputs if output.finish_reason == "stop"]
    assert all(text.count("<f=") == text.count("<f=one>1</f>") for text in texts)


def test_a_text_does_not_depend_on_its_company(llm: LLM) -> None:
    constraints = [{"json": CITY}, {"regex": REGEXES[0]}, {"choice": ["a", "ab"]}, {"json": CITY}]
    together = generate(llm, constraints, logprobs=2)
    for seed, (constraint, expected) in enumerate(zip(constraints, together, strict=True)):
        alone = SamplingParams(
            structured_outputs=StructuredOutputsParams(**constraint),
            seed=seed,
            temperature=1.5,
            max_tokens=700,
            logprobs=2,
        )
        (output,) = llm.generate([PROMPT], alone, use_tqdm=False)
        assert output.outputs[0] == expected


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    """The first token is forced, and its logprob that of a text that nothing forces."""
    (forced,) = generate(llm, [{"choice": ["zebra"]}], logprobs=0, temperature=0.0)
    first = forced.token_ids[0]
    free = SamplingParams(max_tokens=1, logprobs=1, allowed_token_ids=[first], temperature=0.0)
    (output,) = llm.generate([PROMPT], free, use_tqdm=False)
    assert forced.logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert forced.logprobs[0][first].logprob == output.outputs[0].logprobs[0][first].logprob


def test_a_text_that_is_whole_ends_before_min_tokens(llm: LLM) -> None:
    (output,) = generate(llm, [{"choice": ["Paris"]}], min_tokens=50)
    assert (output.text, output.finish_reason) == ("Paris", "stop")


def test_with_ignore_eos_a_text_goes_on_as_long_as_it_may(llm: LLM) -> None:
    (output,) = generate(llm, [{"regex": "a{2,9}"}], ignore_eos=True, max_tokens=40)
    assert (output.text, output.finish_reason) == ("a" * 9, "length")


def test_a_stop_string_cuts_a_constrained_text(llm: LLM) -> None:
    (output,) = generate(llm, [{"regex": "ab{5}c"}], stop=["bbb"])
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_each_of_several_completions_is_constrained(llm: LLM) -> None:
    outputs = generate(llm, [{"json": CITY}], n=5)
    assert len({output.text for output in outputs}) > 1
    for output in outputs:
        jsonschema.validate(json.loads(output.text), CITY)


@pytest.mark.item(15)
def test_a_request_that_can_have_no_token_fails_alone(llm: LLM) -> None:
    """Its own list of tokens has none that the grammar allows."""
    (letter,) = llm.get_tokenizer().encode("a", add_special_tokens=False)
    only_digits = StructuredOutputsParams(regex="[0-9]+")
    params = [
        SamplingParams(structured_outputs=only_digits, allowed_token_ids=[letter], max_tokens=5),
        SamplingParams(structured_outputs=only_digits, max_tokens=5),
    ]
    failed, other = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "no token is left" in str(failed.outputs[0].stop_reason)
    assert other.outputs[0].text.isdigit()


def test_a_bad_constraint_is_refused_before_anything_is_queued(llm: LLM) -> None:
    for bad in (
        {"regex": "("},
        {"json": {"not": {}}},
        {"json": {"$ref": "#"}},
        {"grammar": "start: nothing"},
    ):
        with pytest.raises(ValidationError):
            generate(llm, [bad])
    assert not llm.llm_engine.has_unfinished_requests()


JUMPY = {
    "type": "object",
    "properties": {"identifier": {"enum": ["first", "second"]}, "measurements": {"type": "boolean"}},
    "required": ["identifier", "measurements"],
    "additionalProperties": False,
}


def test_jumping_ahead_saves_steps_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of one request and of a batch of two, with two sequences each, are the same with and without jumps."""
    steps, launch = [], ModelRunner.launch
    monkeypatch.setattr(
        ModelRunner, "launch", lambda runner, plan: steps.append(plan) or launch(runner, plan)
    )
    found = []
    for jump in (0, 8):
        made = LLM(max_num_seqs=4, structured_outputs_config={"jump_ahead": jump})
        outputs = []
        for batch in ([{"json": JUMPY}], [{"json": JUMPY}, {"regex": "[ab]{3}-suffix"}]):
            outputs += generate(made, batch, logprobs=2, n=2)
        found.append((outputs, len(steps)))
        steps.clear()
        made.llm_engine.shutdown()
    (plain, num_plain), (jumped, num_jumped) = found
    assert jumped == plain
    assert num_jumped < 0.8 * num_plain
