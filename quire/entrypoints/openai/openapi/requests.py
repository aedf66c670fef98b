"""JSON schemas of requests, from the models that check them and the limits of a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from quire.entrypoints.openai.field_policy import refusals
from quire.entrypoints.openai.openapi.limits import Limits, Rule, narrow
from quire.entrypoints.openai.openapi.replies import REFERENCE
from quire.entrypoints.openai.protocol.requests import RequestModel

Schema = dict[str, Any]


def request_schemas(models: Iterable[type[RequestModel]], limits: Limits) -> dict[str, Schema]:
    """Components for the models and all that they refer to.

    A field that cannot be honoured is described by the values that ask for nothing.
    """
    wanted = [(model, "validation") for model in dict.fromkeys(models)]
    template = REFERENCE.replace("{name}", "{model}")
    _, schema = models_json_schema(wanted, ref_template=template, schema_generator=_WithoutTitles)  # type: ignore[arg-type]
    rules = limits.rules()
    components = {name: _settled(one, limits, rules) for name, one in schema.get("$defs", {}).items()}
    for model, _ in wanted:
        properties = components[model.__name__]["properties"]
        rules_of = refusals(samples=model.samples)
        refused = rules_of.keys() - properties.keys() - model.model_fields.keys()
        properties.update({name: {"enum": [*rules_of[name].neutral, None]} for name in sorted(refused)})
    if limits.rejects_unknown:
        for model, _ in wanted:
            properties = components[model.__name__]["properties"]
            properties.update({name: {"type": "null"} for name in model.without_effect})
        for component in components.values():
            _close(component)
    of_server = limits.relations()
    for model, _ in wanted:
        if relations := [*model.relations, *of_server.get(model.__name__, ())]:
            components[model.__name__]["allOf"] = relations
    return components


class _WithoutTitles(GenerateJsonSchema):
    """A title would be the field's name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _settled(schema: Schema, limits: Limits, rules: Mapping[str, Rule]) -> Schema:
    """With limits, and null wherever a field may be left out, as which it counts."""
    schema.pop("title", None)
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    for name in limits.idle_fields & properties.keys():
        del properties[name]
    for name, value in properties.items():
        limited = _limited(value, name, rules)
        properties[name] = limited if name in required else _or_null(limited)
    return schema


def _limited(schema: Schema, name: str, rules: Mapping[str, Rule]) -> Schema:
    """Under the rule of this name; fields of an object in it have rules of their own."""
    limited = narrow(schema, rules.get(schema.pop("x-rule", name), {}))
    if "anyOf" in limited:
        limited["anyOf"] = [_limited(one, "", rules) for one in limited["anyOf"]]
    if "properties" in limited:
        limited["properties"] = {
            inner: _limited(one, inner, rules) for inner, one in limited["properties"].items()
        }
    return limited


def _or_null(schema: Schema) -> Schema:
    options = schema.get("anyOf", [])
    if {"type": "null"} in options or not (schema.keys() - {"default", "description"}):
        return schema
    default = {"default": schema.pop("default")} if "default" in schema else {}
    return {"anyOf": [*(options or [schema]), {"type": "null"}], **default}


def _close(schema: Any) -> None:
    """Refuse unknown fields in every object whose fields are known; the others are the client's own.

    Properties without a type are a condition on some fields of an object.
    """
    if isinstance(schema, list):
        for item in schema:
            _close(item)
    elif isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            schema["additionalProperties"] = False
        for item in schema.values():
            _close(item)
