# SPDX-License-Identifier: Apache-2.0
"""vLLM's keywords of `SamplingParams`, of the other parameters of a request, and of methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from quire.errors import ConfigError, ValidationError
from quire.vllm_names.row import Table, accepted, refused, renamed, suggestion, table_of, translated

SAMPLING = table_of(
    renamed("guided_decoding", "structured_outputs"),
    refused(
        "best_of", "ask for n completions with logprobs=0, and sort by cumulative_logprob", harmless=(1,)
    ),
    refused("use_beam_search", "call LLM.beam_search with BeamSearchParams", harmless=(False,)),
    refused("length_penalty", "it is a field of BeamSearchParams", harmless=(1.0,)),
    refused("early_stopping", "it is a field of BeamSearchParams", harmless=(False,)),
    refused(
        "truncate_prompt_tokens",
        "cut the token ids of the prompt; over HTTP the field of this name does so",
        harmless=(),
    ),
    refused("watermarking", "texts are not watermarked", harmless=(False,)),
    refused(
        "prompt_logprob_token_ids prompt_logprob_start",
        "prompt_logprobs reports the most likely tokens of every position",
    ),
    refused("trace_decode_token_ids", "give the tokens as part of the prompt, with prompt_logprobs"),
    refused("routed_experts_prompt_start", "experts of tokens are not reported", harmless=(0,)),
    accepted("skip_clone output_text_buffer_length", "it follows from the other parameters"),
)
POOLING = table_of(
    renamed("normalize", "use_activation"),
    renamed("softmax", "use_activation"),
    renamed("activation", "use_activation"),
    refused("truncate_prompt_tokens", "give tokenization_kwargs to LLM.embed, classify, encode or score"),
)
LORA = table_of(
    renamed("lora_local_path", "lora_path"),
    accepted("base_model_name long_lora_max_len is_3d_lora_weight", "the adapter's files say it"),
    refused("load_inplace", "give weights that changed another lora_int_id", harmless=(False,)),
)
_NO_TRUNCATION = "cut the token ids of the prompt"
_IDS = "a prompt of token ids is a list of them, or {'prompt_token_ids': [...]}"
_IN_PROMPT = "give it in each prompt, beside multi_modal_data"
_TRUNCATION = "give tokenization_kwargs={'truncate_prompt_tokens': N}"
_IDLE = "no request runs between two calls"
_START = table_of(
    accepted("usage_context start_engine_loop enable_multiprocessing", "there is one way to start"),
    refused("stat_loggers", "call add_stat_logger of the engine"),
)
_POOLED = table_of(refused("truncate_prompt_tokens", _TRUNCATION), refused("mm_processor_kwargs", _IN_PROMPT))
METHODS: Mapping[str, Table] = {
    "LLM.generate": table_of(
        refused("prompt_token_ids", _IDS),
        refused("tokenization_kwargs", _NO_TRUNCATION, harmless=({},)),
        refused("mm_processor_kwargs", _IN_PROMPT),
        refused("guided_options_request", "give structured_outputs in SamplingParams"),
    ),
    "LLM.chat": table_of(
        accepted("chat_template_content_format", "the form of a content is found out from the template"),
        refused("tokenization_kwargs", _NO_TRUNCATION, harmless=({},)),
        refused("priority", "give the prompts to generate, which has it"),
    ),
    "LLM.encode": _POOLED,
    "LLM.embed": _POOLED,
    "LLM.classify": _POOLED,
    "LLM.score": _POOLED,
    "LLM.sleep": table_of(accepted("mode", _IDLE)),
    "LLM.reset_prefix_cache": table_of(
        accepted("reset_running_requests", _IDLE),
        refused("reset_connector", "remove the directory of kv_store", harmless=(False,)),
    ),
    "LLM.start_profile": table_of(
        refused("profile_prefix delay_iterations max_iterations", "they are settings of profiler_config")
    ),
    "LLMEngine.from_engine_args": _START,
    "LLMEngine.add_request": table_of(
        accepted("arrival_time", "it is the time of the call"),
        refused("tokenization_kwargs", _NO_TRUNCATION, harmless=({},)),
        refused("trace_headers", "call AsyncLLM.generate, which has it"),
    ),
    "AsyncLLM.from_engine_args": _START,
    "AsyncLLM.generate": table_of(
        refused("tokenization_kwargs", _NO_TRUNCATION, harmless=({},)),
        refused("prompt_text", "give {'prompt': text, 'prompt_token_ids': ids} as the prompt"),
        accepted("session_id kv_hints", "prefixes are found by their content"),
    ),
}
"""Rows by method, and by vLLM's keyword."""
PARAMETERS: Mapping[str, Table] = {
    "SamplingParams": SAMPLING,
    "BeamSearchParams": {},
    "PoolingParams": POOLING,
    "LoRARequest": LORA,
    **METHODS,
}
"""Rows by class or method, and by vLLM's name."""

Method = TypeVar("Method", bound=Callable[..., Any])


def with_vllm_keywords(kind: str) -> Callable[[Method], Method]:
    """Return a decorator for a method of `METHODS`, which then handles vLLM's keywords of it.

    The method raises TypeError for a keyword that is in neither, and ValidationError for one that is not supported.
    """

    def decorate(method: Method) -> Method:
        own = tuple(inspect.signature(method).parameters)

        @functools.wraps(method)
        def call(*args: Any, **keywords: Any) -> Any:
            is_own = keywords.keys() <= set(own)
            return method(*args, **(keywords if is_own else _translated(kind, keywords, own)))

        return cast("Method", call)

    return decorate


class KeywordCheck(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass of parameters that accept vLLM's keywords."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Return an instance.

        Raises:
            TypeError: a keyword is neither a field nor one of vLLM's.
            ValidationError: a keyword of vLLM's is not supported; or as the fields raise.
        """
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            own = cls.__struct_fields__
            if fields.keys() <= set(own):
                raise
            return super().__call__(*args, **_translated(cls.__name__, fields, own))


def _translated(kind: str, fields: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    def spelling(name: str) -> str:
        return f"{name} of {kind}" if kind in METHODS else name

    try:
        result = translated(fields, PARAMETERS[kind], own, spelling)
    except ConfigError as error:
        raise ValidationError(str(error)) from None
    for name in result.keys() - set(own):
        what = "argument" if kind in METHODS else "field"
        raise TypeError(f"{kind} has no {what} {name!r}{suggestion(name, own)}") from None
    return result
