"""Why a request may be refused whose fields all fit the document: no schema can say these."""

from __future__ import annotations

import re
from typing import Any

RELATIONS = (
    # Between fields.
    r"top_logprobs needs logprobs true",
    r"stream_options needs stream true",
    r"function_call needs functions",
    r"function_call must be auto, none or an object with a name",
    r"a beam search cannot be held to a form",
    r"prompt_logprobs cannot be streamed",
    r"logprobs are not supported together with tools",
    r"min_tokens \(\d+\) is greater than max_",
    r"best_of is \d+, so n must be from 1 to that",
    r"best_of above n cannot be streamed",
    r"max_tokens must be at least 1, or 0 with echo true",
    r"logprob_token_ids (needs logprobs true|are for generated tokens)",
    r"logprob_token_ids has \d+ ids: leave logprobs out",
    r"repetition_detection: min_(pattern_size|count) must be an integer in",
    r"has no use in a beam search",
    r"needs use_beam_search true",
    r"n must be an integer in \[1, 64\]",  # the width of a beam search
    r"bad_words (make|has) \d+ ",
    r"suffix needs prompts that are text",
    r"echo cannot be combined with suffix",
    r"continue_final_message and add_generation_prompt cannot both be true",
    r"continue_final_message needs",
    r"(stop|options\.stop|stop_sequences) has \d+ characters in all",
    r"prompts with n = \d+ are \d+ sequences",
    r"allowed_token_ids has only tokens that end the generation",
    r"model is required",  # one of two names for it
    r"input must have at least one item",  # none but items that are left out
    r"(tools|functions)\.\d+(\.function)?\.name .* is another tool's, too",
    r"name .* has characters that a call in the format",
    r"(parameters|input_schema) must be the JSON schema of an object",
    r"functions cannot be sent together with tools",
    r"name must be that of a function that a message before it calls",
    r"is the result of a tool, but no message before it calls one",
    r"(call_id|tool_use_id) .* is the id of no call before it",
    # Of a model that pools.
    r"tokens have no room for text beside the \d+ special tokens",
    r"either texts or inputs are needed",
    r"this server has no IO processor",
    r"a score needs text_1 and text_2 or ",
    r"must have one, or as many",
    r"average_windows (is for texts|is of embeddings|leaves nothing of a text)",
    r"lexical_weights is for models that weigh words",
    r"encoding_format base64 is for one row of numbers",
    r"dimensions are of embeddings",
    r"returned_token_ids (chooses among classes|has \d+, but the model gives)",
    r"is for models that reward each step",
    r"the \w+ makes \d+ prompts",
    # Of adapters, and of files.
    r"adapters are not served here",
    r"lora_name must be 1 to",
    r"a model is called .* already",
    r"^adapter '",
    # With the model: its context, its tokens as keys of an object, its template.
    r"maximum context length is \d+ tokens",
    r"logit_bias has \d+, but token ids are",
    r"suffix needs a model that was made to fill in the middle",
    r"thinking_token_budget needs to know what opens and closes",
    r"vllm_xargs are for logits processors, and this engine has none",
    r"the model's chat template has no place for",
    r"the chat template (refused|failed on) ",
    # With the template or the server, where fields without effect are refused.
    r"unknown field '(messages\[\]\.name|enable_thinking|chat_template_kwargs\.|options\.|think(ing)?')",
    r"unknown field '(reasoning|output_config)[._]effort'",
    r"unknown field 'include\[",
    # Constraints: whether one can be enforced, and how many there are.
    r"(format|json|schema|structural_tag|tools) at /[^:]*: ",
    r"is refused: ",
    r"(is no valid JSON|must be a JSON object or its text)",
    r"must not hold the character NUL",
    r"has \d+ bytes, the limit is",
    r"cannot be sent together with",
    r"guided_whitespace_pattern needs guided_json",
    r"tool_choice (needs tools|names the function)",
    # JSON within text.
    r"arguments must be (the text of )?a JSON object",
    # Of JSON itself: what a double or 64 bits cannot hold, and half a character.
    r"the body holds",
)
_REFUSED = re.compile("|".join(RELATIONS))
_NO_INTEGER = re.compile(r"must be a valid integer|prompt must be text, a list of")


def is_relation(reason: str, body: Any) -> bool:
    """Whether a reason to refuse a body is one of these, or that 1.0 is an integer to JSON Schema and nobody else."""
    return bool(_REFUSED.search(reason) or (_NO_INTEGER.search(reason) and _has_whole_float(body)))


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()
