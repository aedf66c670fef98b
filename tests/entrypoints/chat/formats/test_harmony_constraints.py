# SPDX-License-Identifier: Apache-2.0
"""Constraints in Harmony: they allow gpt-oss's own answers, and each allowed answer parses to the requested form."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.chat.formats.constraint import Form, json_of
from quire.entrypoints.chat.formats.harmony import MARKERS
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.formats.tools import FORMATS
from quire.entrypoints.chat.tool_grammar import AllowedCalls
from quire.errors import ValidationError
from tests.entrypoints.chat.formats.test_constraints import SCHEMAS, Walker, functions, strict

HARMONY = AnswerFormat(next(row for row in FORMATS if row.name == "openai"))
TURN = "<|start|>user<|message|>Hi.<|end|><|start|>assistant"
IN_ANALYSIS = f"{TURN}<|channel|>analysis<|message|>"
IN_FINAL = f"{TURN}<|channel|>final<|message|>"
CLOSED = "<|start|>user<|message|>Hi.<|end|>"
OPENINGS = {"turn": TURN, "in analysis": IN_ANALYSIS, "in final": IN_FINAL, "closed": CLOSED}
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, {{}}?<|end|>{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"n": 1}'
FINAL = "<|channel|>final<|message|>"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}


def calls_of(schemas: dict[str, Any], *, at_most_one: bool = False) -> AllowedCalls:
    return AllowedCalls(strict(schemas), at_most_one)


def walker(form: Form, *, is_special: bool) -> Walker:
    return Walker(form, MARKERS if is_special else ())


def read(text: str, prompt: str) -> list[Event]:
    reader = HARMONY.reader(prompt, {})
    return reader.feed(text) + reader.finish()


def check_calls(found: list[Event], schemas: dict[str, Any]) -> int:
    """Return the number of calls, all with valid arguments; any event other than reasoning fails."""
    calls = [event for event in found if not isinstance(event, Reasoning)]
    for event in calls:
        assert isinstance(event, ToolCall), event
        jsonschema.validate(json.loads(event.arguments), schemas[event.name])
    return len(calls)


def content(found: list[Event]) -> str:
    assert all(isinstance(event, str | Reasoning) for event in found)
    return "".join(event for event in found if isinstance(event, str))


@pytest.mark.parametrize("is_special", [False, True])
def test_required_calls_come_behind_the_reasoning(is_special: bool) -> None:
    grammar = HARMONY.grammar(TURN)
    many = walker(grammar.calls(calls_of(SCHEMAS)), is_special=is_special)
    one = walker(grammar.calls(calls_of(SCHEMAS, at_most_one=True)), is_special=is_special)
    for before in ("", THOUGHT, THOUGHT * 2):
        for call in (CALL, f"{CALL}<|call|>"):
            assert many.takes(before + call)
            assert one.takes(before + call)
            assert many.takes(f"{before}{call}{NEXT}{CALL}<|call|>")
            assert not one.takes(f"{before}{call}{NEXT}{CALL}")
        assert not many.takes(f"{before}{FINAL}Hello.")
        assert not many.takes(before + PREAMBLE + CALL)
    assert not many.takes(THOUGHT.replace("?", "<|call|>") + CALL)
    assert not many.takes(CALL.replace("now", "then"))
    assert not many.takes(CALL.replace("1", '"1"'))
    assert not many.takes("Hello.")


@pytest.mark.parametrize("is_special", [False, True])
def test_a_call_in_text_is_enforced_from_its_head_on(is_special: bool) -> None:
    text = walker(HARMONY.grammar(TURN).calls_in_text(calls_of(SCHEMAS)), is_special=is_special)
    assert text.takes(f"{FINAL}It is noon.")
    assert text.takes(f"{THOUGHT}{FINAL}It is noon.")
    assert text.takes(f"{THOUGHT}{PREAMBLE}{THOUGHT}{CALL}<|call|>")
    assert not text.takes(f"{THOUGHT}{PREAMBLE}{CALL.replace('1', 'null')}")
    assert not text.takes(f"{PREAMBLE}{CALL.replace('now', 'then')}")
    assert not text.takes(f"{FINAL}It is <|channel|>noon.")


@pytest.mark.parametrize("is_special", [False, True])
def test_a_form_is_that_of_the_final_message(is_special: bool) -> None:
    grammar = HARMONY.grammar(TURN)
    text = walker(grammar.text(json_of(CITY)), is_special=is_special)
    both = walker(grammar.text_or_calls(json_of(CITY), calls_of(SCHEMAS)), is_special=is_special)
    for one in (text, both):
        assert one.takes(f'{THOUGHT}{FINAL}{{"city": "Rome"}}')
        assert not one.takes('{"city": "Rome"}')
        assert not one.takes(f"{THOUGHT}{FINAL}{{}}")
        assert not one.takes(THOUGHT + PREAMBLE)
    assert both.takes(f"{THOUGHT}{CALL}<|call|>")
    assert not text.takes(THOUGHT + CALL)


@pytest.mark.parametrize("is_special", [False, True])
def test_an_answer_goes_on_as_its_prompt_has_begun(is_special: bool) -> None:
    final, call = f'{FINAL}{{"city": "Rome"}}', f"{CALL}<|call|>"
    rows = {
        IN_ANALYSIS: ("Hm.<|end|>" + NEXT, "Hm.<|end|>" + NEXT + final),
        CLOSED: (NEXT, NEXT + final),
        IN_FINAL: ("<|end|>" + NEXT, '{"city": "Rome"}'),
    }
    for prompt, (before, text) in rows.items():
        grammar = HARMONY.grammar(prompt)
        assert walker(grammar.text(json_of(CITY)), is_special=is_special).takes(text)
        calls = walker(grammar.calls(calls_of(SCHEMAS)), is_special=is_special)
        assert calls.takes(before + call)
        assert calls.takes(before + THOUGHT + call)
        assert not calls.takes(call)
        assert content(read(text, prompt)) == '{"city": "Rome"}'
        assert check_calls(read(before + call, prompt), SCHEMAS) == 1
    inside = walker(HARMONY.grammar(IN_FINAL).calls_in_text(calls_of(SCHEMAS)), is_special=is_special)
    assert inside.takes("Hello.")
    assert inside.takes(f"Hello.<|end|>{NEXT}{call}")
    assert not inside.takes(f"Hello.{call}")


def test_message_begun_by_a_client_continues_far_from_its_head() -> None:
    long = "word " * 100
    wanted = json_of(CITY)
    assert HARMONY.grammar(long[-256:], continued=long).text(wanted) is wanted
    reader = HARMONY.reader(f"{IN_FINAL}So far", None, continued="So far")
    assert reader.feed(" so good.") == [" so good."]


def test_a_prompt_that_ends_in_a_head_is_refused() -> None:
    with pytest.raises(ValidationError, match="ends in the head of a Harmony message"):
        HARMONY.grammar(f"{TURN}<|channel|>final").text(json_of(CITY))


@pytest.mark.parametrize("opening", OPENINGS)
@settings(derandomize=True, max_examples=6, deadline=None)
@given(drawn=functions(), is_special=st.booleans(), at_most_one=st.booleans(), seed=st.integers(0, 2**32))
def test_allowed_text_is_parsed_as_requested(
    opening: str, drawn: Any, is_special: bool, at_most_one: bool, seed: int
) -> None:
    schemas, _ = drawn
    prompt, rng = OPENINGS[opening], random.Random(seed)
    grammar, calls = HARMONY.grammar(prompt), calls_of(schemas, at_most_one=at_most_one)
    only = walker(grammar.calls(calls), is_special=is_special).wander(rng)
    if only is not None:
        num_calls = check_calls(read(only, prompt), schemas)
        assert num_calls == 1 if at_most_one else num_calls >= 1
    free = walker(grammar.calls_in_text(calls), is_special=is_special).wander(rng)
    if free is not None:
        found = [event for event in read(free, prompt) if isinstance(event, ToolCall)]
        check_calls(list(found), schemas)
        assert len(found) == free.count("to=functions.")
    text = walker(grammar.text(json_of(CITY)), is_special=is_special).wander(rng)
    if text is not None:
        jsonschema.validate(json.loads(content(read(text, prompt))), CITY)
