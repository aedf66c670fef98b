# SPDX-License-Identifier: Apache-2.0
"""Normalizes a client's constraint into one that a backend compiles as it is.

Invariant: normalization is pure and bounded by the size of its input; the front end does it once. The result is within
the limits here; `Checker` finds out whether it compiles within time and memory.
"""

from __future__ import annotations

from quire.errors import ValidationError
from quire.json_schema.schema import MAX_SCHEMA_BYTES, Path, dump_json, normalize_schema, parse_json, pointer
from quire.json_schema.structural_tag import normalize_tag
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings, invalid

MAX_GRAMMAR_BYTES = MAX_SCHEMA_BYTES
FLEXIBLE_SPACE = r"( |\n( {0,20}|\t{0,10}))?"
"""Default whitespace between JSON tokens: nothing, a space, or a line break with indentation. It is bounded, because a
model that may write any number of spaces may never finish."""
NO_SPACE = ""


def normalize(
    params: StructuredOutputsParams, settings: StructuredOutputsSettings
) -> StructuredOutputsParams:
    """Return the same constraint in a form that depends on no setting.

    Raises:
        ValidationError: a limit is exceeded, or a part cannot be enforced; the message names it.
    """
    closed = params.disable_additional_properties or settings.disable_additional_properties
    space = params.whitespace_pattern
    if params.disable_any_whitespace or (space is None and settings.disable_any_whitespace):
        space = NO_SPACE
    elif space is None:
        space = FLEXIBLE_SPACE
    for name in ("regex", "grammar", "whitespace_pattern"):
        _check_size(name, getattr(params, name))
    if params.json is not None:
        schema = normalize_schema(parse_json("json", _text(params.json)), _refusal, closed=closed)
        return StructuredOutputsParams(json=dump_json(schema), whitespace_pattern=space)
    if params.json_object:
        return StructuredOutputsParams(json='{"type":"object"}', whitespace_pattern=space)
    if params.structural_tag is not None:
        tag = normalize_tag(parse_json("structural_tag", _text(params.structural_tag)), closed=closed)
        return StructuredOutputsParams(structural_tag=dump_json(tag), whitespace_pattern=space)
    if params.choice is not None:
        _check_size("choice", "".join(params.choice))
        return StructuredOutputsParams(choice=params.choice)
    return StructuredOutputsParams(regex=params.regex, grammar=params.grammar)


def _refusal(path: Path, why: str) -> ValidationError:
    return invalid("json", f"at {pointer(path)}: {why}")


def _text(value: object) -> str:
    assert isinstance(value, str), "StructuredOutputsParams keeps JSON as text"
    return value


def _check_size(name: str, text: str | None) -> None:
    try:
        num_bytes = len((text or "").encode())
    except UnicodeEncodeError as error:
        raise invalid(name, f"is not valid Unicode: lone surrogate at position {error.start}") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise invalid(name, f"has {num_bytes} bytes, the limit is {MAX_GRAMMAR_BYTES}")
