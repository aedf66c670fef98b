# SPDX-License-Identifier: Apache-2.0
"""Relations between request fields as JSON schemas, for the OpenAPI document.

Each relation states what the reader named beside it checks, as alternative forms of the whole request, from which a
generator can choose. Comparisons between numbers cannot be stated in a schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.openai.protocol.constraints import OTHER_NAMES, SPACES
from quire.sampling_params import MAX_BEAM_WIDTH
from quire.structured_outputs_params import PARAM

Schema = dict[str, Any]

# `constraints.constraint_of`
_FREE_TEXT: Schema = {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}
_NO_FORM: Schema = {name: {"enum": [None]} for name in (PARAM, *OTHER_NAMES)} | {
    "grammar": {"enum": [None, ""]},
    "response_format": {"anyOf": [{"type": "null"}, _FREE_TEXT]},
}
# `beam_search.beam_search_params` and `sampling`
# Neutral values of fields that beam search does not support; null is always neutral, and a seed has no effect.
NOT_IN_SEARCHES: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "temperature_last": (False,),
    "top_n_sigma": (0, -1),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    SPACES: (),
    "logit_bias": ({},),
    "logprob_token_ids": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "stream": (False,),
    "stream_interval": (),
    "stream_options": (),
    "temperature": (0, 1),
    "thinking_token_budget": (-1,),
    "top_k": (-1, 0),
    "top_p": (1,),
    "vllm_xargs": ({},),
}
ONLY_SEARCHES: Mapping[str, tuple[Any, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}
_NOT_STRICT: Schema = {"properties": {"strict": {"enum": [None, False]}}}
_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def either(*forms: Schema) -> Schema:
    return {"anyOf": list(forms)}


def both(*forms: Schema) -> Schema:
    """Return the conjunction; no two forms constrain one field."""
    properties = {name: one for form in forms for name, one in form.get("properties", {}).items()}
    required = [name for form in forms for name in form.get("required", ())]
    return {"properties": properties, "required": required} if required else {"properties": properties}


def asks_nothing(name: str, *neutral: Any) -> Schema:
    """Return a schema for a field that is absent, null, or neutral."""
    return {"properties": {name: {"enum": [None, *neutral]}}}


def has(name: str, schema: Schema) -> Schema:
    """Return a schema for a field that is present and matches `schema`."""
    return {"properties": {name: schema}, "required": [name]}


def is_true(name: str) -> Schema:
    return has(name, {"const": True})


def has_items(name: str) -> Schema:
    return has(name, {"type": "array", "minItems": 1})


def is_whole(name: str, **limits: int) -> Schema:
    """Return a schema for a field that is absent, null, or an integer within these limits."""
    return {"properties": {name: {"anyOf": [{"type": "integer", **limits}, {"type": "null"}]}}}


def _no_form_but(*names: str) -> Schema:
    return {"properties": {name: one for name, one in _NO_FORM.items() if name not in names}}


ONE_FORM = either(
    both(_no_form_but("response_format"), asks_nothing(SPACES)),
    both(_no_form_but(PARAM), asks_nothing(SPACES)),
    *(both(_no_form_but(name), has(name, {"not": _NO_FORM[name]})) for name in OTHER_NAMES),
)  # At most one constraint; only the fields of the last alternatives allow a whitespace pattern.

_NO_SEARCH = both(
    asks_nothing("use_beam_search", False),
    *(asks_nothing(name, *neutral) for name, neutral in ONLY_SEARCHES.items()),
)
_STREAMED = both(_NO_SEARCH, is_true("stream"), asks_nothing("prompt_logprobs"))
_WHOLE = both(_NO_SEARCH, asks_nothing("stream", False), asks_nothing("stream_options"))
_SEARCH = both(
    is_true("use_beam_search"),
    is_whole("n", maximum=MAX_BEAM_WIDTH),
    *(asks_nothing(name, *neutral) for name, neutral in NOT_IN_SEARCHES.items()),
    _no_form_but(),
)
_SEARCH_OF_COMPLETION = both(_SEARCH, is_whole("max_tokens", minimum=1))
WAYS_OF_COMPLETIONS = either(
    _STREAMED,
    _WHOLE,
    both(_SEARCH_OF_COMPLETION, asks_nothing("echo", False)),
    both(_SEARCH_OF_COMPLETION, asks_nothing("logprobs")),
)
WAYS_OF_CHATS = either(
    _STREAMED,
    _WHOLE,
    both(
        _SEARCH,
        asks_nothing("tool_choice", "none", "auto"),
        asks_nothing("function_call", "none", "auto"),
        {"properties": {"tools": {"items": {"properties": {"function": _NOT_STRICT}}}}},
        {"properties": {"functions": {"items": _NOT_STRICT}}},
    ),
)

# `sampling.completion_params` and `prompts`
_NO_ECHO = both(asks_nothing("echo", False), is_whole("max_tokens", minimum=1))
ECHO = either(
    both(is_true("echo"), asks_nothing("logprob_token_ids"), asks_nothing("suffix", "")),
    both(_NO_ECHO, asks_nothing("suffix", "")),
    both(_NO_ECHO, has("suffix", {"type": "string", "minLength": 1}), has("prompt", _TEXTS)),
)  # With echo no token need be generated.

# `sampling.chat_params`
LOGPROBS = either(both(asks_nothing("top_logprobs"), asks_nothing("logprob_token_ids")), is_true("logprobs"))

# `chat_prompt.translate` and `tool_choice.tools_in_use`
_NO_FUNCTIONS = both(asks_nothing("functions", []), asks_nothing("function_call", "none", "auto"))
TOOLS = either(
    both(_NO_FUNCTIONS, asks_nothing("tool_choice", "none", "auto")),
    both(_NO_FUNCTIONS, has_items("tools")),
    both(has_items("functions"), asks_nothing("tools", []), asks_nothing("tool_choice")),
)

# `chat_prompt.chat_prompt`
CONTINUED = either(
    asks_nothing("continue_final_message", False), asks_nothing("add_generation_prompt", False)
)

OF_COMPLETIONS = (WAYS_OF_COMPLETIONS, ONE_FORM, ECHO)
OF_CHATS = (WAYS_OF_CHATS, ONE_FORM, LOGPROBS, TOOLS, CONTINUED)
