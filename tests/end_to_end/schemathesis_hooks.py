"""What schemathesis takes for a failure and is none, each with its reason; and a check of our own."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import schemathesis

from tests.entrypoints.openai.relations import is_relation

EXTRA_HEADER = "in header - object with unexpected properties"
"""Whoever stands between client and server may add headers, so no server refuses them."""


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether it is one."""
    if failure.code == "ST202" and response.status_code == 400:
        return not is_relation(response.content.decode(), case.body)
    return not (failure.code == "ST201" and EXTRA_HEADER in failure.message)


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
