# SPDX-License-Identifier: Apache-2.0
"""Hooks of schemathesis: its false failures, each with the reason, and checks of our own.

It makes requests from the document without what fields ask of each other, of which there are too many combinations for
it. Whether one fits is judged by the document as it is published.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import schemathesis

from tests.entrypoints.openai.relations import is_relation

EXTRA_HEADER = "in header - object with unexpected properties"
"""Whoever stands between client and server may add headers, so no server refuses them."""


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether it is one: a body that fits may be refused for one of few reasons, and another must be refused."""
    if failure.code == "ST202" and response.status_code == 400:
        return fits(case) and not is_relation(response.content.decode(), case.body)
    return not (failure.code == "ST201" and EXTRA_HEADER in failure.message)


@functools.cache
def body_validator(path: str, method: str) -> jsonschema_rs.Draft202012Validator:
    document = json.loads(Path(os.environ["PUBLISHED_DOCUMENT"]).read_bytes())
    body = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema_rs.Draft202012Validator({**body, "components": document["components"]})


def fits(case: Any) -> bool:
    """Whether the published document allows the body."""
    return bool(body_validator(case.operation.path, case.method.lower()).is_valid(case.body))


@schemathesis.check
def nothing_else_is_taken(ctx: Any, response: Any, case: Any) -> None:
    """No answer is given to a body that the published document does not allow."""
    if response.status_code == 200 and isinstance(case.body, dict):
        assert fits(case), "a body is taken that the document does not allow"


@schemathesis.check
def lines_conform(ctx: Any, response: Any, case: Any) -> None:
    """Every line of a stream of JSON lines is what the document says; schemathesis has no reader of these."""
    if not response.headers.get("content-type", [""])[0].startswith("application/x-ndjson"):
        return
    document = case.operation.schema.raw_schema
    success = document["paths"][case.operation.path][case.method.lower()]["responses"]["200"]
    schema = success["content"]["application/x-ndjson"]["schema"]
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})
    for line in response.content.decode().splitlines():
        validator.validate(json.loads(line))
