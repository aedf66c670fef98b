"""What schemathesis takes for a failure and is none, each with the reason; and checks of our own.

A request whose data fit the schema may be refused only for one of `RELATIONS`, which no schema can say.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import schemathesis

RELATIONS = (
    # Between fields.
    r"top_logprobs needs logprobs true",
    r"stream_options needs stream true",
    r"prompt_logprobs cannot be streamed",
    r"logprobs are not supported together with tools",
    r"min_tokens \(\d+\) is greater than max_",
    r"best_of is \d+, so n must be from 1 to that",
    r"best_of above n cannot be streamed",
    r"max_tokens must be at least 1, or 0 with echo true",
    r"continue_final_message and add_generation_prompt cannot both be true",
    r"continue_final_message needs",
    r"(stop|options\.stop|stop_sequences) has \d+ characters in all",
    r"prompts with n = \d+ are \d+ sequences",
    r"allowed_token_ids has only tokens that end the generation",
    r"model is required",  # one of two names for it
    # With the model: its context, its tokens as keys of an object, its template.
    r"maximum context length is \d+ tokens",
    r"logit_bias has \d+, but token ids are",
    r"the model's chat template has no place for",
    r"the chat template (refused|failed on) ",
    r"nothing to continue",
    # What is described as its API has it, and not there yet.
    r"(format|output_config) is not supported",
    r"input must have at least one item",  # none but items that are left out
    # JSON within text.
    r"arguments must be (the text of )?a JSON object",
    # Of JSON itself: what a double or 64 bits cannot hold, and half a character.
    r"the body holds",
)
REFUSED = re.compile("|".join(RELATIONS))
NO_INTEGER = re.compile(r"must be a valid integer|prompt must be text, a list of")
"""1.0 is an integer to JSON Schema, and to nobody else."""
ANYBODY_MAY_ADD_A_HEADER = "in header - object with unexpected properties"


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Whether it is one."""
    if failure.code == "ST202" and response.status_code == 400:
        reason = response.content.decode()
        return not (REFUSED.search(reason) or (NO_INTEGER.search(reason) and _has_whole_float(case.body)))
    if failure.code == "ST201":
        return ANYBODY_MAY_ADD_A_HEADER not in failure.message
    return True


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


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
