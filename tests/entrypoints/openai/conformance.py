# SPDX-License-Identifier: Apache-2.0
"""Check of a reply against the server's OpenAPI document: status, headers, media type, all fields of the body."""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

import httpx
import jsonschema_rs
from fastapi import FastAPI

from quire.entrypoints.openai.openapi.limits import ServerLimits

Schema = dict[str, Any]
ALIASES = {"/v1/models/": "/v1/models"}
"""Other spellings that are answered, too."""
_documents: dict[Any, Contract] = {}


class Contract:
    """A document, closed: no object of a reply may have a field that is not described."""

    def __init__(self, document: Schema) -> None:
        self.document = _closed(copy.deepcopy(document))
        self._paths = {
            path: re.compile(re.sub(r"\\\{\w+\\\}", "(.+)", re.escape(path))) for path in document["paths"]
        }

    def operation(self, method: str, path: str) -> tuple[str, Schema] | None:
        """The template of a path and its operation; None: the document has none for them."""
        path = ALIASES.get(path, path)
        found = (
            [path]
            if path in self._paths
            else [one for one, form in self._paths.items() if form.fullmatch(path)]
        )
        methods = self.document["paths"][found[0]] if found else {}
        return (found[0], methods[method.lower()]) if method.lower() in methods else None

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        """Raise AssertionError unless the document allows this reply; the path is without `root_path`."""
        found = self.operation(method, path)
        if found is None:
            assert response.status_code in (400, 401, 404, 405, 408, 413, 415, 431, 503), (
                "an undescribed reply"
            )
            return
        template, operation = found
        status = str(response.status_code)
        assert status in operation["responses"], f"{method} {path} does not say that it answers {status}"
        described = self._resolved(operation["responses"][status])
        self._check_headers(described.get("headers", {}), response)
        media_type = response.headers.get("content-type", "")
        content = described.get("content", {})
        if not content:
            assert not response.content
            return
        known = {name.partition(";")[0]: name for name in content}
        name = media_type.partition(";")[0]
        assert name in known, f"{method} {path} does not say that it sends {media_type}"
        self._check_body(
            name, (template, method.lower(), status, known[name]), content[known[name]]["schema"], response
        )

    def _check_headers(self, described: Schema, response: httpx.Response) -> None:
        for name, reference in described.items():
            header = self._resolved(reference)
            assert name in response.headers or not header["required"], f"{name} is missing"
            if name in response.headers:
                value: Any = response.headers[name]
                value = int(value) if header["schema"]["type"] == "integer" else value
                jsonschema_rs.validate(header["schema"], value)
        for name in response.headers:
            assert name in described or not name.startswith(("x-quire", "retry-", "www-")), (
                f"{name} is not described"
            )

    def _check_body(self, media_type: str, place: Any, schema: Schema, response: httpx.Response) -> None:
        if media_type == "text/event-stream":
            self._check_events(place, schema, response.text)
        elif media_type == "application/x-ndjson":
            for line in response.text.splitlines():
                self._validator(place, schema).validate(json.loads(line))
        elif media_type == "application/json":
            self._validator(place, schema).validate(response.json())
        else:
            self._validator(place, schema).validate(response.text)

    def _check_events(self, place: Any, schema: Schema, text: str) -> None:
        validator = self._validator(place, schema)
        for event in text.removesuffix("\n\n").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.split("\n"))
            validator.validate(fields)
            options = schema["properties"]["data"]
            options = options.get("anyOf", [options])
            if fields["data"] == "[DONE]":
                continue
            content = next(one["contentSchema"] for one in options if "contentSchema" in one)
            self._validator((*place, "data"), content).validate(json.loads(fields["data"]))

    def _resolved(self, node: Schema) -> Schema:
        while "$ref" in node:
            node = functools.reduce(lambda at, key: at[key], node["$ref"].split("/")[1:], self.document)
        return node

    def _validator(self, place: Any, schema: Schema) -> jsonschema_rs.Draft202012Validator:
        known = vars(self).setdefault("_validators", {})
        if place not in known:
            whole = {**schema, "components": self.document["components"]}
            known[place] = jsonschema_rs.Draft202012Validator(whole)
        return known[place]


def contract_of(app: FastAPI) -> Contract:
    """Return the contract of an app; apps with equal documents share one."""
    document, state = app.state.document, app.state.server
    limits = ServerLimits.from_server(state)
    key = (limits, document.facts)
    if key not in _documents:
        _documents[key] = Contract(document.under(limits))
    return _documents[key]


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(value) for name, value in node.items()}
    if node.get("type") == "object" and "properties" in node:
        closed["additionalProperties"] = False
    return closed
