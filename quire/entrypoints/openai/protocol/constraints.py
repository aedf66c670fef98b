# SPDX-License-Identifier: Apache-2.0
"""Structured-output fields of a request: OpenAI's, vLLM's, and those of similar servers.

Invariant: each field maps to one of the constraints of `StructuredOutputsParams`; a request has at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from quire.entrypoints.openai.protocol import shapes
from quire.errors import ValidationError
from quire.structured_outputs_params import PARAM, StructuredOutputsParams, structured_outputs_of

Constraint = dict[str, Any]
SPACES = "guided_whitespace_pattern"
ResponseFormat = Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.RESPONSE_FORMAT))]
StructuredOutputs = Annotated[
    dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.STRUCTURED_OUTPUTS))
]
JsonSchema = Annotated[str | dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.SCHEMA_OR_TEXT))]
GrammarField = Annotated[str | None, WithJsonSchema(shapes.optional(shapes.GRAMMAR))]
PatternField = Annotated[str | None, WithJsonSchema(shapes.optional(shapes.PATTERN))]
ChoiceField = Annotated[list[str] | None, WithJsonSchema(shapes.optional(shapes.CHOICE))]

OTHER_NAMES: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}  # Fields with the same value as a constraint: older names of vLLM, and those of SGLang and llama.cpp.


class ConstraintFields(BaseModel):
    """Constraint fields, at most one of which may be set. Checked here, with clearer errors than pydantic's."""

    model_config = ConfigDict(protected_namespaces=())

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: JsonSchema = None
    guided_regex: PatternField = None
    guided_choice: ChoiceField = None
    guided_grammar: GrammarField = None
    json_schema: JsonSchema = None
    regex: PatternField = None
    ebnf: GrammarField = None
    grammar: PatternField = None
    guided_whitespace_pattern: PatternField = None


def constraint_field(request: ConstraintFields) -> str | None:
    """Return the name of the field that holds the request's constraint.

    Raises:
        ValidationError: several fields do.
    """
    names = ("response_format", PARAM, *OTHER_NAMES)
    given = [name for name in names if _is_given(name, getattr(request, name))]
    if len(given) > 1:
        raise ValidationError(f"{given[1]} cannot be sent together with {given[0]}", param=given[1])
    return given[0] if given else None


def constraint_of(request: ConstraintFields) -> StructuredOutputsParams | None:
    """Return the request's constraint; None if its text is unconstrained.

    Raises:
        ValidationError: the constraint is malformed, or there are several.
    """
    name = constraint_field(request)
    if request.guided_whitespace_pattern is not None and name not in OTHER_NAMES:
        raise ValidationError(f"{SPACES} needs guided_json", param=SPACES)
    if name is None:
        return None
    value = getattr(request, name)
    if name == PARAM:
        return structured_outputs_of(value)
    if name == "response_format":
        return StructuredOutputsParams(**_format(value))
    spaces = request.guided_whitespace_pattern
    return StructuredOutputsParams(**{OTHER_NAMES[name]: value, "whitespace_pattern": spaces})


def _is_given(name: str, value: Any) -> bool:
    """Return whether a value is a constraint: an empty grammar and the format `text` are not."""
    if name == "grammar" and value == "":
        return False
    return value is not None and not (name == "response_format" and value.get("type") == "text")


def _format(form: Mapping[str, Any]) -> Constraint:
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        known = ", ".join(["text", *FORMATS])
        raise ValidationError(f"response_format.type must be one of {known}", param="response_format")
    return FORMATS[kind](form)


def _object(form: Mapping[str, Any]) -> Constraint:
    schema = form.get("schema")
    return {"json_object": True} if schema is None else {"json": _checked_schema(schema)}


def _schema(form: Mapping[str, Any]) -> Constraint:
    """Return the constraint of `json_schema`; its `strict` has no effect, since schemas are always enforced."""
    inner = form.get("json_schema", form)
    if not isinstance(inner, dict):
        raise ValidationError("response_format.json_schema must be an object", param="response_format")
    return {"json": _checked_schema(inner.get("schema"))}


def _checked_schema(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise ValidationError(
            "response_format.json_schema.schema must be a JSON schema: an object", param="response_format"
        )
    return schema


def _text_of(field: str, name: str) -> Callable[[Mapping[str, Any]], Constraint]:
    def read(form: Mapping[str, Any]) -> Constraint:
        if not isinstance(form.get(field), str):
            raise ValidationError(f"response_format.{field} must be text", param="response_format")
        return {name: form[field]}

    return read


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Constraint]] = {
    "json_object": _object,
    "json_schema": _schema,
    "structural_tag": lambda form: {"structural_tag": dict(form)},
    "grammar": _text_of("grammar", "grammar"),
    "regex": _text_of("pattern", "regex"),
}  # Type of `response_format` -> constraint.
