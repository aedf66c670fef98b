"""The worker's last look at a request before its integers become indices.

Invariant: the front end has already refused such requests with a better message; this check exists so that a
bug there costs one request and never memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.config.pooling import PoolingSpec
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData


def why_unusable(
    request: NewRequestData, vocab_size: int, max_model_len: int, pooling: PoolingSpec | None = None
) -> str | None:
    """The reason why the request cannot get a row, or None if it can; `pooling` is the model's."""
    num_tokens = len(request.token_ids)
    if not 0 < num_tokens <= max_model_len:
        return f"the request has {num_tokens} tokens, the limit is 1 to {max_model_len}"
    if not 0 < request.num_prompt_tokens <= num_tokens:
        return f"the request has {request.num_prompt_tokens} prompt tokens of {num_tokens} tokens"
    refusal = _why_not_pooled(request, pooling)
    if refusal is not None:
        return refusal
    params = request.sampling_params
    if params.thinking_token_budget is not None and params.thinking_markers is None:
        return "thinking_token_budget needs thinking_markers"
    indexed: dict[str, Iterable[int]] = {
        "token id": request.token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": [token_id for word in params.bad_words_token_ids for token_id in word],
        "thinking_markers": _markers(params),
    }
    return next((bad for name, ids in indexed.items() if (bad := _out_of_range(name, ids, vocab_size))), None)


def _why_not_pooled(request: NewRequestData, pooling: PoolingSpec | None) -> str | None:
    params = request.pooling_params
    if pooling is None or params is None:
        generates, pools = params is None, pooling is not None
        if generates != pools:
            return None
        return "the model pools prompts and generates nothing" if pools else "the model has no pooler"
    try:
        pooling.check(params)
    except ValidationError as error:
        return str(error)
    return None


def _markers(params: SamplingParams) -> tuple[int, ...]:
    markers = params.thinking_markers
    return () if markers is None else (*markers.start_ids, *markers.end_ids)


def _out_of_range(name: str, token_ids: Iterable[int], vocab_size: int) -> str | None:
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low >= 0 and high < vocab_size:
        return None
    return f"{name} {low if low < 0 else high} is not in the vocabulary of {vocab_size} tokens"
