# SPDX-License-Identifier: Apache-2.0
"""Conversion of requests to `SamplingParams`.

Invariant: a value comes from the request, else from the model's generation config, else from `SamplingParams`. Errors
name the field that the client sent, even if the engine's name differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.entrypoints.openai.protocol.constraints import constraint_field, constraint_of
from quire.entrypoints.openai.protocol.requests import (
    SAMPLERS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from quire.errors import ValidationError
from quire.features import SEARCH_PARAMS
from quire.plugins import import_place
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.structured_outputs_params import PARAM

COMPLETION_MAX_TOKENS = 16
# llama.cpp's names -> quire's.
OTHER_SAMPLER_NAMES = {"repeat_penalty": "repetition_penalty", "penalty_last_n": "repeat_last_n"}
SAME_NAME = (
    *(name for name in SAMPLERS if name not in OTHER_SAMPLER_NAMES),
    "n", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids", "skip_special_tokens",
    "include_stop_str_in_output", "prompt_logprobs", "logprob_token_ids", "bad_words", "thinking_token_budget",
    "stream_interval",
)  # fmt: skip
NOT_WITH_MIROSTAT = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "dynatemp_range",
)  # Filters that mirostat replaces.
MODEL_DEFAULTS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
# The engine's field names -> the client's.
ENGINE_NAMES = {"extra_args": "vllm_xargs", "beam_width": "n", "bad_words_token_ids": "bad_words"}
MAX_TOKENS_DEFAULTS = ("max_tokens", "max_new_tokens")


@functools.cache
def _search_readers() -> tuple[Callable[..., BeamSearchParams | None], ...]:
    return tuple(import_place(place) for place in SEARCH_PARAMS.values())


def search_params(
    request: GenerationRequest, room: int, shown_special_token_ids: Sequence[int] = ()
) -> BeamSearchParams | None:
    """Return the parameters of a search, by the readers in `SEARCH_PARAMS`; None if none is requested.

    Args:
        room: maximum number of generated tokens, for a chat without a limit.

    Raises:
        ValidationError: a field applies only with, or only without, a search.
    """
    for read in _search_readers():
        found = read(request, room, shown_special_token_ids)
        if found is not None:
            return found
    if request.use_beam_search and not SEARCH_PARAMS:
        raise ValidationError(
            "this installation has no beam search (quire.beam_search)", param="use_beam_search"
        )
    return None


def completion_params(
    request: CompletionRequest,
    defaults: Mapping[str, Any],
    *,
    detokenize: bool,
    default_max_tokens: int | None = COMPLETION_MAX_TOKENS,
) -> SamplingParams:
    """Return the sampling parameters of a completion.

    Args:
        default_max_tokens: of a request without `max_tokens`; None fills the context.

    Raises:
        ValidationError: a value is out of range, or two are incompatible.
    """
    _check_stream(request)
    max_tokens = _completion_max_tokens(request, default_max_tokens)
    params: dict[str, Any] = {"n": _num_candidates(request), "max_tokens": max_tokens}
    listed = request.logprob_token_ids
    is_silent = request.logprobs is None and listed is None
    params["logprobs"] = 0 if is_ranked(request) and is_silent else request.logprobs
    if request.echo and listed is not None:
        raise ValidationError(
            "logprob_token_ids covers generated tokens only, and echo needs logprobs of the prompt; leave one out",
            param="logprob_token_ids",
        )
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        params["prompt_logprobs"] = request.logprobs
    params["structured_outputs"] = constraint_of(request)
    return _build(request, defaults, detokenize, params)


def chat_params(request: ChatCompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a chat completion without its constraint; by default it may fill the context.

    Raises:
        ValidationError: a value is out of range, or two are incompatible.
    """
    _check_stream(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ValidationError("top_logprobs needs logprobs true", param="top_logprobs")
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise ValidationError(
            f"top_logprobs must be at least 0, got {request.top_logprobs}", param="top_logprobs"
        )
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    if max_tokens is None:
        max_tokens = next((int(defaults[name]) for name in MAX_TOKENS_DEFAULTS if name in defaults), None)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if request.logprob_token_ids is not None:
        if not request.logprobs:
            raise ValidationError("logprob_token_ids needs logprobs true", param="logprob_token_ids")
        logprobs = request.top_logprobs
    return _build(request, defaults, True, {"max_tokens": max_tokens, "logprobs": logprobs})


def is_ranked(request: CompletionRequest) -> bool:
    """Return whether there are more candidates than choices, so that logprobs decide."""
    return request.best_of is not None and request.best_of > request.n


def check_ranking(request: CompletionRequest, logprobs_mode: str) -> None:
    """Raise ValidationError if candidates are ranked by logprobs while the engine reports logits."""
    if is_ranked(request) and logprobs_mode.endswith("logits"):
        raise ValidationError(
            f"best_of ranks by logprobs, and --logprobs-mode is {logprobs_mode}", param="best_of"
        )


def note_max_tokens(
    request: GenerationRequest, params: SamplingParams | BeamSearchParams, rooms: Iterable[int]
) -> None:
    """Note the context's limit where it is below the request's; of several prompts the lowest counts."""
    room = min(rooms)
    if params.max_tokens is not None and 0 < room < params.max_tokens:
        request.notes.adjust(_client_name("max_tokens", request) or "max_tokens", room)


@contextmanager
def client_names(request: GenerationRequest) -> Iterator[None]:
    """Rename fields in errors from the engine's names to those of the request."""
    try:
        yield
    except ValidationError as error:
        name = _client_name(error.param, request)
        if name is None or error.param is None:
            raise
        raise type(error)(error.message.replace(error.param, name, 1), param=name) from None


def _client_name(param: str | None, request: GenerationRequest) -> str | None:
    if param in ENGINE_NAMES:
        return ENGINE_NAMES[param]
    if (param or "").startswith(PARAM):
        field = constraint_field(request) or "tools"
        return None if field == PARAM else field
    for other, name in OTHER_SAMPLER_NAMES.items():
        if param == name and getattr(request, name) is None and getattr(request, other) is not None:
            return other
    if isinstance(request, CompletionRequest):
        return "best_of" if param == "n" and request.best_of is not None else None
    if not isinstance(request, ChatCompletionRequest):
        return None
    if param == "max_tokens" and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return {"logprobs": "top_logprobs", "prompt": "messages"}.get(param or "")


def _build(
    request: GenerationRequest, defaults: Mapping[str, Any], detokenize: bool, params: dict[str, Any]
) -> SamplingParams:
    values = {name: value for name, value in defaults.items() if name in MODEL_DEFAULTS}
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    values |= _by_other_names(request)
    if values.get("mirostat"):
        for name in NOT_WITH_MIROSTAT:
            if getattr(request, name) is not None:
                request.notes.ignore(name)
    if request.repetition_detection is not None:
        values["repetition_detection"] = request.repetition_detection.model_dump()
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    if request.vllm_xargs:
        values["extra_args"] = request.vllm_xargs
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        **{**values, **params}, logit_bias=_logit_bias(request), detokenize=detokenize, output_kind=kind
    )


def _by_other_names(request: GenerationRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for other, name in OTHER_SAMPLER_NAMES.items():
        value, same = getattr(request, other), getattr(request, name)
        if value is not None and same not in (None, value):
            raise ValidationError(f"{other} is {value}, and {name} is {same}: send one of them", param=other)
        if value is not None:
            values[name] = value
    return values


def _logit_bias(request: GenerationRequest) -> dict[int, float] | None:
    if request.logit_bias is None:
        return None
    for key in request.logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 19):
            raise ValidationError(f"logit_bias keys must be token ids, got {key!r:.40}", param="logit_bias")
    return {int(key): value for key, value in request.logit_bias.items()}


def _num_candidates(request: CompletionRequest) -> int:
    if request.best_of is None:
        return request.n
    if not 1 <= request.n <= request.best_of:
        raise ValidationError(
            f"best_of is {request.best_of}, so n must be from 1 to that, not {request.n}", param="best_of"
        )
    if request.stream and is_ranked(request):
        raise ValidationError("best_of above n cannot be streamed", param="best_of")
    return request.best_of


def _completion_max_tokens(request: CompletionRequest, default: int | None) -> int | None:
    if request.max_tokens != 0:
        return default if request.max_tokens is None else request.max_tokens
    if not request.echo:
        raise ValidationError("max_tokens must be at least 1, or 0 with echo true", param="max_tokens")
    return 1  # the engine needs at least one token; the answer omits it


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ValidationError("stream_options needs stream true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ValidationError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
