# SPDX-License-Identifier: Apache-2.0
"""OpenAPI document of one server: operations, request and reply schemas, errors and access."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from msgspec import UNSET, inspect
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from quire import __version__
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    ANTHROPIC_SHAPE,
    OPENAI_SHAPE,
    REQUEST_ID,
    SHAPES,
    ErrorShape,
    shape_of,
)
from quire.entrypoints.openai.field_rules import refusals
from quire.entrypoints.openai.notes import ADJUSTED_HEADER, IGNORED_HEADER
from quire.entrypoints.openai.openapi.limits import Rule, ServerLimits, narrow
from quire.entrypoints.openai.openapi.operation import Operation, operation_of
from quire.entrypoints.openai.protocol.media_shapes import of_server
from quire.entrypoints.openai.protocol.requests import RequestModel

Schema = dict[str, Any]

EVERYWHERE = (400, 408, 413, 415, 431, 500, 503)  # Statuses that middleware may answer for any route.
HEADERS: dict[str, tuple[str, Schema]] = {
    REQUEST_ID: ("The server's name for this request.", {"type": "string"}),
    ANTHROPIC_REQUEST_ID: ("The same, as Anthropic's clients read it.", {"type": "string"}),
    "retry-after": ("Seconds after which to ask again.", {"type": "integer", "minimum": 1}),
    "www-authenticate": ("How a key is sent.", {"type": "string", "const": "Bearer"}),
    "x-should-retry": ("Whether to ask again.", {"type": "string", "const": "false"}),
    IGNORED_HEADER: ("Fields of the request that had no effect.", {"type": "string"}),
    ADJUSTED_HEADER: ("Values that were taken instead of those sent.", {"type": "string"}),
}
OPTIONAL_HEADERS = (IGNORED_HEADER, ADJUSTED_HEADER)
SCHEMES: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "adminBearer": {"type": "http", "scheme": "bearer", "description": "The admin key."},
    "adminHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The admin key."},
}
KEY, ADMIN_KEY = ("bearer", "header"), ("adminBearer", "adminHeader")  # Either of two ways to send a key.
REFERENCE = "#/components/schemas/{name}"
_LONG_NAME = re.compile(r"quire\.entrypoints\.(?:openai\.)?(\w+)\.(?:\w+\.)*(\w+)")
JSON = "application/json"
FORM = "multipart/form-data"
TEXT: Schema = {"type": "string"}
DESCRIPTION = (
    "Unknown paths are answered 404, other methods 405, in the shape of OpenAI's errors; HEAD is answered wherever GET "
    "is. A field without effect is accepted and named in the reply unless the server refuses it."
)


@dataclass(frozen=True)
class ErrorStatus:
    """Description of an error status in all APIs, and its headers besides `x-request-id`."""

    description: str
    headers: tuple[str, ...] = ()


STATUSES = {
    400: ErrorStatus("A field has a value that cannot be honored, or the body or its form is wrong."),
    401: ErrorStatus("The key is missing or wrong.", ("www-authenticate",)),
    403: ErrorStatus("The operator does not allow this."),
    404: ErrorStatus("The server does not know what is named."),
    408: ErrorStatus("The request did not come in in time (--read-timeout)."),
    409: ErrorStatus("Not while the server is in this state; nothing was done."),
    413: ErrorStatus("The body is larger than --max-request-bytes."),
    415: ErrorStatus("The body is not declared as JSON, or is encoded otherwise than with gzip."),
    429: ErrorStatus("The key has used up what it may use for now.", ("retry-after",)),
    431: ErrorStatus("The request has too many headers, or too long ones."),
    500: ErrorStatus("The server met an error of its own."),
    503: ErrorStatus("The model is loading, the queue is full, or the server is ending.", ("retry-after",)),
    504: ErrorStatus("The request's time was over before anything was generated.", ("x-should-retry",)),
}


@dataclass(frozen=True)
class AccessRules:
    """Access rules; `has_keys` is false for a server that needs a key for admin routes only."""

    has_keys: bool
    has_limits: bool
    open_paths: frozenset[str]

    def schemes(self, path: str, *, is_control: bool) -> tuple[str, ...]:
        """Return the names of the alternative security schemes of a path; none: it is open."""
        if is_control:
            return ADMIN_KEY
        return KEY if self.has_keys and path not in self.open_paths else ()

    def errors(self, path: str, method: str, *, is_control: bool) -> list[int]:
        """Return the statuses that a path may answer because of keys."""
        needs_key = bool(self.schemes(path, is_control=is_control))
        return [401] * needs_key + [429] * (self.has_limits and method == "POST")


def header_references(names: Iterable[str]) -> Schema:
    """Return headers of a response as references to `header_components`."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def header_components() -> Schema:
    return {
        name: {
            "description": description,
            "required": name not in (ANTHROPIC_REQUEST_ID, *OPTIONAL_HEADERS),
            "schema": schema,
        }
        for name, (description, schema) in HEADERS.items()
    }


def reply_schemas(types: Iterable[Any]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Return the schema of each type, and the components that they refer to.

    A field is required unless its default is UNSET: other defaults are always written.
    """
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for cls in _structs(inspect.multi_type_info(types)):
        long_name = f"{cls.__module__}.{cls.__qualname__}"
        _set_required(components[long_name if long_name in components else cls.__name__], cls)
    schemas, components = _with_short_names(schemas, components)
    return dict(zip(types, schemas, strict=True)), components


def _set_required(schema: Schema, cls: type[msgspec.Struct]) -> None:
    tag = cls.__struct_config__.tag_field
    always = [one.encode_name for one in msgspec.structs.fields(cls) if one.default is not UNSET]
    schema["required"] = [*([] if tag is None else [tag]), *always]
    del schema["title"]
    for field_schema in schema["properties"].values():
        field_schema.pop("default", None)


def _structs(nodes: Iterable[inspect.Type]) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct in a tree of types once."""
    seen: set[type] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, inspect.StructType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            pending += [one.type for one in node.fields]
        elif isinstance(node, inspect.UnionType):
            pending += node.types
        elif isinstance(node, inspect.CollectionType):
            pending.append(node.item_type)
        elif isinstance(node, inspect.DictType):
            pending.append(node.value_type)
        elif isinstance(node, inspect.Metadata):
            pending.append(node.type)


def _with_short_names(*values: Any) -> Any:
    """Shorten the module of structs whose names collide to their family."""
    return json.loads(_LONG_NAME.sub(_short_name, json.dumps(values)))


def _short_name(found: re.Match[str]) -> str:
    family = "" if found[1] == "protocol" else found[1].capitalize()  # OpenAI's own
    return family + found[2]


def request_schemas(models: Iterable[type[RequestModel]], limits: ServerLimits) -> dict[str, Schema]:
    """Return the components of the request models and all types that they refer to.

    A rejected field is described by its neutral values.
    """
    wanted = [(model, "validation") for model in dict.fromkeys(models)]
    template = REFERENCE.replace("{name}", "{model}")
    _, schema = models_json_schema(wanted, ref_template=template, schema_generator=_WithoutTitles)  # type: ignore[arg-type]
    rules = limits.rules()
    defined = of_server(schema.get("$defs", {}), limits.media)
    components = {name: _with_limits(one, limits, rules) for name, one in defined.items()}
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
    server_relations = limits.relations()
    for model, _ in wanted:
        if relations := [*model.relations, *server_relations.get(model.__name__, ())]:
            components[model.__name__]["allOf"] = relations
    return components


class _WithoutTitles(GenerateJsonSchema):
    """Schema generator without titles, which only repeat field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _with_limits(schema: Schema, limits: ServerLimits, rules: Mapping[str, Rule]) -> Schema:
    """Apply the limits; every optional field may be null, which means absent."""
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
    """Apply the rule of this name; fields of an inner object have rules of their own."""
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
    """Reject unknown fields in every object with a declared type and fields.

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


ALL_SHAPES = (OPENAI_SHAPE, *SHAPES.values())


@dataclass(frozen=True)
class DescribedOperation:
    """Operation of a path with its route's description; `is_control` marks admin routes."""

    path: str
    method: str
    route: APIRoute
    operation: Operation
    is_control: bool

    @property
    def name(self) -> str:
        words = re.findall(r"\w+", self.path)
        is_folder = len(self.path) > 1 and self.path.endswith(
            "/"
        )  # TRL's routes, beside others without the slash
        return "_".join([self.method.lower(), *words, *(["slash"] if is_folder else [])])


class Document:
    """Generator of the document; regenerated when the server's limits change."""

    def __init__(
        self, routers: Sequence[APIRouter], controls: Sequence[APIRouter], access: AccessRules
    ) -> None:
        self._described = [*_described(routers, is_control=False), *_described(controls, is_control=True)]
        self._access = access
        self._written: tuple[ServerLimits, Schema] | None = None

    @property
    def facts(self) -> tuple[tuple[str, ...], AccessRules]:
        """Routes and access rules: all that determines the document besides the limits."""
        return tuple(one.name for one in self._described), self._access

    @property
    def paths(self) -> list[str]:
        """Paths that the server offers."""
        return sorted({one.path for one in self._described})

    def under(self, limits: ServerLimits) -> Schema:
        """Return the document for these limits; must not be modified."""
        if self._written is None or self._written[0] != limits:
            self._written = (limits, self._write(limits))
        return self._written[1]

    def _write(self, limits: ServerLimits) -> Schema:
        operations = [one.operation for one in self._described]
        types: list[Any] = [shape.type for shape in ALL_SHAPES]
        types += [one.reply for one in operations if one.reply is not None]
        types += [one.anthropic for one in operations if one.anthropic is not None]
        types += [one.stream.item for one in operations if one.stream is not None]
        self._replies, components = reply_schemas(types)
        requests = request_schemas((model for one in operations for model in one.body), limits)
        assert not components.keys() & requests.keys(), "a request and a reply have the same name"
        return {
            "openapi": "3.1.0",
            "info": {"title": "quire", "version": __version__, "description": DESCRIPTION},
            "paths": self._paths(),
            "components": {
                "schemas": components | requests,
                "responses": self._errors(),
                "headers": header_components(),
                "securitySchemes": self._schemes(),
            },
        }

    def _paths(self) -> Schema:
        paths: Schema = {}
        for one in self._described:
            paths.setdefault(one.path, {})[one.method.lower()] = self._operation(one)
        return paths

    def _schemes(self) -> Schema:
        used = {name for one in self._described for name in self._schemes_of(one)}
        return {name: scheme for name, scheme in SCHEMES.items() if name in used}

    def _schemes_of(self, one: DescribedOperation) -> tuple[str, ...]:
        return self._access.schemes(one.path, is_control=one.is_control)

    def _operation(self, one: DescribedOperation) -> Schema:
        operation: Schema = {
            "operationId": one.name,
            "summary": one.route.summary or one.route.name.replace("_", " ").capitalize(),
            "description": one.route.description,
            "responses": self._responses(one),
        }
        parameters = list(_parameters(one))
        if parameters:
            operation["parameters"] = parameters
        if one.operation.body:
            schema = _any_of([_reference(model.__name__) for model in one.operation.body])
            media_type = FORM if one.operation.is_form else JSON
            operation["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
        schemes = self._schemes_of(one)
        if schemes:
            operation["security"] = [{name: []} for name in schemes]
        return operation

    def _responses(self, one: DescribedOperation) -> Schema:
        by_key = self._access.errors(one.path, one.method, is_control=one.is_control)
        errors = sorted({*EVERYWHERE, *by_key, *one.operation.errors})
        shapes = [shape_of(one.path), *([ANTHROPIC_SHAPE] if one.operation.anthropic else [])]
        answers = {str(status): self._error(shapes, status) for status in errors}
        return {"200": self._success(one), **answers}

    def _success(self, one: DescribedOperation) -> Schema:
        operation = one.operation
        content: Schema = {media_type: {"schema": schema} for media_type, schema in operation.other.items()}
        if operation.reply is not None:
            replies = filter(None, (operation.reply, operation.anthropic))
            content = {JSON: {"schema": _any_of([self._replies[reply] for reply in replies])}, **content}
        if operation.stream is not None:
            stream = operation.stream
            schema = stream.write(self._replies[stream.item], self._replies[shape_of(one.path).type])
            content[stream.media_type] = {"schema": schema}
        headers = [*_id_headers([shape_of(one.path)]), *(OPTIONAL_HEADERS if operation.body else ())]
        success: Schema = {"description": "Done.", "headers": header_references(headers)}
        return {**success, "content": content} if content else success

    def _errors(self) -> Schema:
        """Return each status in the shape of each API."""
        return {
            _error_name(shape, status): self._described_error([shape], status)
            for shape in ALL_SHAPES
            for status in STATUSES
        }

    def _error(self, shapes: list[ErrorShape], status: int) -> Schema:
        if len(shapes) > 1:
            return self._described_error(shapes, status)
        return {"$ref": f"#/components/responses/{_error_name(shapes[0], status)}"}

    def _described_error(self, shapes: list[ErrorShape], status: int) -> Schema:
        known = STATUSES[status]
        return {
            "description": known.description,
            "headers": header_references([*_id_headers(shapes), *known.headers, *OPTIONAL_HEADERS]),
            "content": {JSON: {"schema": _any_of([self._replies[shape.type] for shape in shapes])}},
        }


def _described(routers: Iterable[APIRouter], *, is_control: bool) -> Iterator[DescribedOperation]:
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                operation = operation_of(route.endpoint) or Operation()
                for method in sorted(route.methods or ()):
                    yield DescribedOperation(route.path_format, method, route, operation, is_control)


def _id_headers(shapes: Sequence[ErrorShape]) -> list[str]:
    """Return the request id headers of responses in these shapes."""
    return [REQUEST_ID, ANTHROPIC_REQUEST_ID] if ANTHROPIC_SHAPE in shapes else [REQUEST_ID]


def _parameters(one: DescribedOperation) -> Iterator[Schema]:
    for name in re.findall(r"\{(\w+)\}", one.path):
        yield {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
    for name, schema in one.operation.headers.items():
        yield {"name": name, "in": "header", "required": False, "schema": schema}
    for name, schema in one.operation.query.items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _error_name(shape: ErrorShape, status: int) -> str:
    return f"{shape.type.__name__}{status}"


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(name=name)}


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
