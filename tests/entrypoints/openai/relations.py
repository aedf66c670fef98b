# SPDX-License-Identifier: Apache-2.0
"""Reasons to refuse a request whose fields all fit the document; no schema can express them."""

from __future__ import annotations

import re
from typing import Any

RELATIONS = (
    # Between fields.
    r"beam search does not support structured output or required tool calls",
    r"min_tokens \(\d+\) is greater than max_",
    r"best_of is \d+, so n must be from 1 to that",
    r"best_of above n cannot be streamed",
    r"logprob_token_ids has \d+ ids: leave logprobs out",
    r"repetition_detection: min_(pattern_size|count) must be an integer in",
    r"bad_words (make|has) \d+ ",
    r"dry_sequence_breakers (has|stand in) \d+ ",
    r"(repeat_penalty|penalty_last_n) is [^:]*: send one of them",
    r"continue_final_message needs",
    r"(stop|options\.stop|stop_sequences) has \d+ characters in all",
    r"prompts with n = \d+ are \d+ sequences",
    r"allowed_token_ids has only tokens that end the generation",
    r"(tools|functions)\.\d+(\.function|\.custom|\.tools\.\d+)?\.name .* is already used by another tool",
    r"name .* has characters that a call in the format",
    r"(parameters|input_schema) must be the JSON schema of an object",
    # Of a model that translates.
    r"_language is for models that translate",
    # Of a model that pools.
    r"tokens have no room for text beside the \d+ special tokens",
    r"data needs an IO processor",
    r"must have one, or as many",
    r"average_windows (needs texts|is for embeddings|and truncation cannot be combined)",
    r"lexical_weights needs a model with lexical weights",
    r"the \w+ makes \d+ prompts",
    # Of adapters, and of files.
    r"this server serves no adapters",
    r"the name .* is already served",
    r"\badapter '",
    r"lora_path cannot be read: ",
    # With the model: its context, its tokens as keys of an object, its template.
    r"maximum context length is \d+ tokens",
    r"thinking_token_budget needs the markers",
    r"the model has no chat template",
    r"the model's chat template has no place for",
    r"the chat template (refused|failed on) ",
    # With the template or the server, where fields without effect are refused.
    r"unknown field '(messages\[\]\.(tool_)?name|options\.)",
    r"unknown field '((tool_choice\.)?tools\[\]|messages\[\]\.content\[\]|input\[\])\.",
    # Constraints: whether one can be enforced, and how many there are.
    r"(format|json|schema|structural_tag|tools) at /[^:]*: ",
    r"is refused: ",
    r"(is no valid JSON|must be a JSON object or its text)",
    r"has \d+ bytes, the limit is",
    r"(tool_choice|function_call) names the function",
    r"tool_choice (allows the tool|is required, but)",
    # Of JSON itself: what a double or 64 bits cannot hold, and half a character.
    r"the body holds",
)
_REFUSED = re.compile("|".join(RELATIONS))
_NO_INTEGER = re.compile(r"must be a valid integer|(prompt|input) must be text, a list of")


def is_relation(reason: str, body: Any) -> bool:
    """Whether a reason to refuse a body is one of these, or that 1.0 is an integer to JSON Schema and nobody else."""
    return bool(_REFUSED.search(reason) or (_NO_INTEGER.search(reason) and _has_whole_float(body)))


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()
