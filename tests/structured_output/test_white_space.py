# SPDX-License-Identifier: Apache-2.0
"""White space within JSON: pretty and compact forms are allowed, and no run of it is long."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from quire.structured_output.backend import GrammarBackend, Masks
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.normalize import normalize
from quire.structured_output.xgrammar_backend import XGrammarBackend
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from tests.fixtures.folded import folded

VOCABULARY = Vocabulary.from_bytes()
BACKENDS = [GuidanceBackend(VOCABULARY), XGrammarBackend(VOCABULARY)]
LONGEST = 21
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]},
        "d": {"enum": [{"x": [1, 2]}, []]},
        "e": {"type": "array", "maxItems": 0},
        "f": {"type": "object", "additionalProperties": False},
    },
    "required": ["a", "b", "d", "e", "f"],
    "additionalProperties": False,
}
VALUE = {"a": [1, 2], "b": {"c": True}, "d": {"x": [1, 2]}, "e": [], "f": {}}
IN_TAG = [
    {"type": "const_string", "value": "<x>"},
    {"type": "json_schema", "json_schema": SCHEMA},
    {"type": "const_string", "value": "</x>"},
]
FORMS: list[dict[str, Any]] = [
    {"json_object": True},
    {"json": SCHEMA},
    {"structural_tag": {"type": "sequence", "elements": IN_TAG}},
]


def spaced_text(backend: GrammarBackend, form: dict[str, Any], seed: int) -> str:
    """A text of a constraint that takes white space nearly wherever it may; strings are short."""
    rng, written = random.Random(seed), bytearray()
    matcher = backend.compile(
        normalize(StructuredOutputsParams(**form), StructuredOutputsSettings())
    ).new_matcher()
    while not matcher.is_complete and len(written) < 800:
        masks = Masks(1, len(VOCABULARY.tokens))
        matcher.fill(masks, 0)
        allowed = [byte for byte in range(256) if masks.allows(0, byte)]
        in_string = written.count(b'"') % 2 == 1
        if in_string and ord('"') in allowed:
            byte = ord('"')
        else:
            spaces = [] if in_string else [byte for byte in allowed if byte in b" \t\r\n"]
            byte = rng.choice(spaces if spaces and rng.random() < 0.97 else allowed)
        assert matcher.advance(byte)
        written.append(byte)
    return written.decode(errors="replace")


@folded("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@folded("form", FORMS, ids=lambda form: next(iter(form)))
def test_white_space_has_no_long_run(backend: GrammarBackend, form: dict[str, Any]) -> None:
    for seed in range(5):
        text = re.sub(r'"[^"]*"', '""', spaced_text(backend, form, seed))
        assert max(map(len, re.findall(r"\s+", text)), default=0) <= LONGEST, text


@folded("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@folded("indent", [None, 0, 1, 2, 4, "\t"])
def test_pretty_and_compact_json_is_allowed(backend: GrammarBackend, indent: int | str | None) -> None:
    grammar = backend.compile(normalize(StructuredOutputsParams(json=SCHEMA), StructuredOutputsSettings()))
    for separators in ((",", ":"), (",", ": "), (", ", ": ")):
        if indent is not None and separators[0] == ", ":
            continue  # a space before a line break is none of the forms that JSON is printed in
        matcher = grammar.new_matcher()
        text = json.dumps(VALUE, indent=indent, separators=separators)
        assert all(map(matcher.advance, text.encode())), text
        assert matcher.may_end


@folded("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@folded("around", [" {0}", "{0} ", "{0}\n", "\t{0}"])
def test_white_space_around_a_value_is_not_allowed(backend: GrammarBackend, around: str) -> None:
    grammar = backend.compile(normalize(StructuredOutputsParams(json=SCHEMA), StructuredOutputsSettings()))
    matcher = grammar.new_matcher()
    text = around.format(json.dumps(VALUE))
    assert not (all(map(matcher.advance, text.encode())) and matcher.may_end)
