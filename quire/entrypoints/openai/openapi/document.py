"""The OpenAPI document of one server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from quire import __version__
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    ANTHROPIC_SHAPE,
    OPENAI_SHAPE,
    REQUEST_ID,
    SHAPES,
    Shape,
    shape_of,
)
from quire.entrypoints.openai.openapi.limits import Limits
from quire.entrypoints.openai.openapi.operation import Operation, operation_of
from quire.entrypoints.openai.openapi.refusals import (
    EVERYWHERE,
    OPTIONAL_HEADERS,
    SCHEMES,
    STATUSES,
    Access,
    header_components,
    header_references,
)
from quire.entrypoints.openai.openapi.replies import REFERENCE, reply_schemas
from quire.entrypoints.openai.openapi.requests import request_schemas

Schema = dict[str, Any]
JSON = "application/json"
TEXT: Schema = {"type": "string"}
ALL_SHAPES = (OPENAI_SHAPE, *SHAPES.values())
DESCRIPTION = (
    "Unknown paths are answered 404, other methods 405, in the shape of OpenAI's errors; HEAD is answered wherever GET "
    "is. A field without effect is accepted and named in the reply unless the server refuses it."
)


@dataclass(frozen=True)
class Described:
    """A method of a path, with what its route says of itself; `is_control` routes answer to the admin key."""

    path: str
    method: str
    route: APIRoute
    operation: Operation
    is_control: bool

    @property
    def name(self) -> str:
        words = re.findall(r"\w+", self.path)
        return "_".join([self.method.lower(), *words])


class Document:
    """Writes the document of these routers, anew whenever the engine has settled other limits."""

    def __init__(self, routers: Sequence[APIRouter], controls: Sequence[APIRouter], access: Access) -> None:
        self._described = [
            *_described(routers, is_control=False),
            *_described(controls, is_control=True),
        ]
        self._access = access
        self._written: tuple[Limits, Schema] | None = None

    @property
    def facts(self) -> tuple[tuple[str, ...], Access]:
        """What decides the document besides the limits: the routes, and who may use them."""
        return tuple(one.name for one in self._described), self._access

    def under(self, limits: Limits) -> Schema:
        """The document under these limits; not to be changed."""
        if self._written is None or self._written[0] != limits:
            self._written = (limits, self._write(limits))
        return self._written[1]

    def _write(self, limits: Limits) -> Schema:
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

    def _schemes_of(self, one: Described) -> tuple[str, ...]:
        return self._access.schemes(one.path, is_control=one.is_control)

    def _operation(self, one: Described) -> Schema:
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
            operation["requestBody"] = {
                "required": True,
                "content": {JSON: {"schema": _any_of([_reference(m.__name__) for m in one.operation.body])}},
            }
        schemes = self._schemes_of(one)
        if schemes:
            operation["security"] = [{name: []} for name in schemes]
        return operation

    def _responses(self, one: Described) -> Schema:
        by_key = self._access.errors(one.path, one.method, is_control=one.is_control)
        errors = sorted({*EVERYWHERE, *by_key, *one.operation.errors})
        shapes = [shape_of(one.path), *([ANTHROPIC_SHAPE] if one.operation.anthropic else [])]
        answers = {str(status): self._error(shapes, status) for status in errors}
        return {"200": self._success(one), **answers}

    def _success(self, one: Described) -> Schema:
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
        """Each status in the shape of each API."""
        return {
            _error_name(shape, status): self._described_error([shape], status)
            for shape in ALL_SHAPES
            for status in STATUSES
        }

    def _error(self, shapes: list[Shape], status: int) -> Schema:
        if len(shapes) > 1:
            return self._described_error(shapes, status)
        return {"$ref": f"#/components/responses/{_error_name(shapes[0], status)}"}

    def _described_error(self, shapes: list[Shape], status: int) -> Schema:
        known = STATUSES[status]
        return {
            "description": known.description,
            "headers": header_references([*_id_headers(shapes), *known.headers, *OPTIONAL_HEADERS]),
            "content": {JSON: {"schema": _any_of([self._replies[shape.type] for shape in shapes])}},
        }


def _described(routers: Iterable[APIRouter], *, is_control: bool) -> Iterator[Described]:
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                operation = operation_of(route.endpoint) or Operation()
                for method in sorted(route.methods or ()):
                    yield Described(route.path_format, method, route, operation, is_control)


def _id_headers(shapes: Sequence[Shape]) -> list[str]:
    """Return the headers with the request's id, in answers of these shapes."""
    return [REQUEST_ID, ANTHROPIC_REQUEST_ID] if ANTHROPIC_SHAPE in shapes else [REQUEST_ID]


def _parameters(one: Described) -> Iterator[Schema]:
    for name in re.findall(r"\{(\w+)\}", one.path):
        yield {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
    for name, schema in one.operation.headers.items():
        yield {"name": name, "in": "header", "required": False, "schema": schema}
    for name, schema in one.operation.query.items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _error_name(shape: Shape, status: int) -> str:
    return f"{shape.type.__name__}{status}"


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(name=name)}


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
