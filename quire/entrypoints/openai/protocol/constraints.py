"""The fields by which a request asks its text to have a form: OpenAI's, vLLM's, and those of servers like it.

Invariant: whatever a field is called, it means one of the constraints of `StructuredOutputsParams`, and a request has
at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from quire.entrypoints.openai.protocol import shapes
from quire.errors import ValidationError
from quire.structured_output.params import PARAM, StructuredOutputsParams, structured_outputs_of

Constraint = dict[str, Any]
SPACES = "guided_whitespace_pattern"
ResponseFormat = Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.RESPONSE_FORMAT))]
StructuredOutputs = Annotated[
    dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.STRUCTURED_OUTPUTS))
]
JsonSchema = Annotated[str | dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.SCHEMA_OR_TEXT))]
Grammar = Annotated[str | None, WithJsonSchema(shapes.optional(shapes.GRAMMAR))]
Pattern = Annotated[str | None, WithJsonSchema(shapes.optional(shapes.PATTERN))]
Choice = Annotated[list[str] | None, WithJsonSchema(shapes.optional(shapes.CHOICE))]


class ConstraintFields(BaseModel):
    """At most one of these, the last apart. Their values are read here, and not by pydantic, whose errors say less."""

    model_config = ConfigDict(protected_namespaces=())

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: JsonSchema = None
    guided_regex: Pattern = None
    guided_choice: Choice = None
    guided_grammar: Grammar = None
    json_schema: JsonSchema = None
    regex: Pattern = None
    ebnf: Grammar = None
    grammar: Pattern = None
    guided_whitespace_pattern: Pattern = None


OTHER_NAMES: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields with the value itself: older names of vLLM's, and those of SGLang and llama.cpp."""


def constraint_field(request: ConstraintFields) -> str | None:
    """The field that has the request's constraint.

    Raises:
        ValidationError: two have one.
    """
    names = ("response_format", PARAM, *OTHER_NAMES)
    given = [name for name in names if _is_given(name, getattr(request, name))]
    if len(given) > 1:
        raise ValidationError(f"{given[1]} cannot be sent together with {given[0]}", param=given[1])
    return given[0] if given else None


def constraint_of(request: ConstraintFields) -> StructuredOutputsParams | None:
    """What the request's text must be; None if it may be anything.

    Raises:
        ValidationError: the constraint has no valid form, or there are several.
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
    """Whether a value asks for anything: no grammar, and free text, are what happens anyway."""
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
    """The schema is one level down, beside a name and `strict`, which makes no difference: it is always kept to."""
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
}
"""Types of `response_format`, to constraints."""
