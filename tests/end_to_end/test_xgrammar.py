# SPDX-License-Identifier: Apache-2.0
"""The included model under xgrammar: every finished text satisfies its constraint."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.outputs import CompletionOutput
from quire.sampling_params import StructuredOutputsParams
from tests.structured_output.random_schemas import RandomSchemas

PROMPT = "Answer in the form that is asked for: "
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
NOT_KEPT_TO = re.compile("structured_outputs[.]json at /.*: the xgrammar backend does not support ")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(max_num_seqs=32, structured_outputs_config={"backend": "xgrammar", "jump_ahead": 8})
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


def is_kept_to(llm: LLM, schema: dict[str, Any]) -> bool:
    """Whether it is taken at all; the reason to refuse it must be the backend's."""
    try:
        generate(llm, [{"json": schema}], max_tokens=1)
    except ValidationError as error:
        return NOT_KEPT_TO.match(error.message) is None
    return True


@pytest.mark.more
def test_finished_texts_validate_against_random_schemas(llm: LLM) -> None:
    source = RandomSchemas(seed=3)
    drawn = (source.draw() for _ in range(1000))
    kept = (schema for schema in drawn if is_kept_to(llm, schema))
    schemas = [next(kept) for _ in range(25)]
    outputs = generate(llm, [{"json": schema} for schema in schemas])
    finished = [(o, schema) for o, schema in zip(outputs, schemas, strict=True) if o.finish_reason == "stop"]
    checker = jsonschema.FormatChecker(formats=["date", "uuid", "ipv4", "email"])
    for output, schema in finished:
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(output.text))
    assert len(finished) > 0.9 * len(schemas)


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"(?:\d{3}-){2}[a-f]{1,3}"}, r"(?:\d{3}-){2}[a-f]{1,3}"),
    ({"regex": r"日本|é{1,3}|\S{3}"}, r"日本|é{1,3}|\S{3}"),
    ({"choice": ["Paris", "Par", 'a "b"\n']}, r'Paris|Par|a "b"\n'),
    ({"grammar": 'root ::= "yes" | "no" [0-9]{2} "."'}, r"yes|no\d\d\."),
    ({"json": CITY, "disable_any_whitespace": True}, r'\{"city":"[^"]*.*","n":-?\d+\}'),
    ({"structural_tag": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema":
      {"enum": [1, 2]}}, "end": "</a>"}}, "<a>[12]</a>"),
]  # fmt: skip


@pytest.mark.more
def test_texts_follow_the_constraint_in_any_batch(llm: LLM) -> None:
    """Alone, where what is forced is guessed ahead, they are the same."""
    constraints = [constraint for constraint, _ in CONSTRAINTS]
    together = generate(llm, constraints * 2, logprobs=2, max_tokens=300)
    for seed, (output, (constraint, pattern)) in enumerate(zip(together, CONSTRAINTS * 2, strict=True)):
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), (constraint, output.text)
        alone = SamplingParams(
            structured_outputs=StructuredOutputsParams(**constraint),
            seed=seed,
            temperature=1.5,
            max_tokens=300,
            logprobs=2,
        )
        assert llm.generate([PROMPT], alone, use_tqdm=False)[0].outputs[0] == output
    assert sum(output.finish_reason == "stop" for output in together) > len(together) / 2


def test_spaces_come_to_an_end(llm: LLM) -> None:
    (space,) = llm.get_tokenizer().encode(" ", add_special_tokens=False)
    outputs = generate(llm, [{"json": CITY}] * 4, logit_bias={space: 100.0}, max_tokens=300)
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_unsupported_schema_keyword_is_refused_at_its_place(llm: LLM) -> None:
    with pytest.raises(
        ValidationError, match="at /properties/a: the xgrammar backend does not support oneOf"
    ):
        generate(llm, [{"json": {"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}}}])
    with pytest.raises(ValidationError, match="whitespace_pattern"):
        generate(llm, [{"json": {}, "whitespace_pattern": " *"}])


def test_without_its_package_the_backend_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package xgrammar: .*install .*'xgrammar<"):
        LLM(structured_outputs_config={"backend": "xgrammar"})
