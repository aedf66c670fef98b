# SPDX-License-Identifier: Apache-2.0
"""`use_beam_search` of completions and chat completions -> `BeamSearchParams`.

Invariant: fields that sample randomly, or end a text early, contradict beam search and are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.entrypoints.openai.protocol.constraints import constraint_field
from quire.entrypoints.openai.protocol.relations import NOT_IN_SEARCHES, ONLY_SEARCHES
from quire.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from quire.errors import ValidationError
from quire.sampling_params import BeamSearchParams


def beam_search_params(
    request: GenerationRequest, room: int, shown_special_token_ids: Sequence[int] = ()
) -> BeamSearchParams | None:
    """Return the beam search parameters of width `n`; None if beam search is not requested.

    Args:
        room: maximum number of generated tokens, for a chat without a limit.

    Raises:
        ValidationError: a field applies only with, or only without, beam search.
    """
    if not request.use_beam_search:
        _refuse(request, ONLY_SEARCHES, "needs use_beam_search true")
        return None
    _refuse(request, NOT_IN_SEARCHES, "is not supported with beam search")
    constraint = constraint_field(request)
    if constraint is not None:
        raise ValidationError(
            f"{constraint} is not supported with beam search; leave it out", param=constraint
        )
    if any(tool.function.strict for tool in getattr(request, "shown_tools", ())):
        raise ValidationError(
            "strict of a tool is not supported with beam search; leave it out", param="tools"
        )
    if getattr(request, "tools", None) and getattr(request, "tool_choice", None) not in (
        None,
        "auto",
        "none",
    ):
        raise ValidationError("tool_choice is not supported with beam search", param="tool_choice")
    return BeamSearchParams(
        beam_width=request.n,
        max_tokens=_max_tokens(request, room),
        ignore_eos=request.ignore_eos,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=_num_logprobs(request),
        shown_special_token_ids=tuple(shown_special_token_ids),
    )


def _max_tokens(request: GenerationRequest, room: int) -> int:
    if isinstance(request, ChatCompletionRequest):
        limits = (request.max_completion_tokens, request.max_tokens, room)
        return next(limit for limit in limits if limit is not None)
    return 16 if request.max_tokens is None else request.max_tokens


def _num_logprobs(request: GenerationRequest) -> int:
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise ValidationError("top_logprobs needs logprobs true", param="top_logprobs")
        return request.top_logprobs or 0
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise ValidationError("echo with logprobs is not supported with beam search", param="echo")
    return getattr(request, "logprobs", None) or 0


def _refuse(request: GenerationRequest, neutral: Mapping[str, tuple[Any, ...]], why: str) -> None:
    for name, values in neutral.items():
        value = getattr(request, name, None)
        if value is not None and value not in values:
            raise ValidationError(f"{name} {why}; leave it out", param=name)
