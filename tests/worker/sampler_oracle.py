"""The sampler, one row at a time and as plainly as it can be said."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData

MASK_32 = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & MASK_32,
            (first >> 32) ^ counter[3] ^ key[1],
            first & MASK_32,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK_32, (key[1] + 0xBB67AE85) & MASK_32]
    return counter


def uniform(seed: int, position: int) -> float:
    seed %= 2**64
    words = philox4x32([position & MASK_32, position >> 32, 0, 0], [seed & MASK_32, seed >> 32])
    return ((words[0] << 32 | words[1]) >> 12) / 2**52


def order(logits: list[float]) -> list[int]:
    """Token ids from the most to the least likely."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [weight / sum(weights) for weight in weights]


def changed_logits(logits: list[float], request: NewRequestData) -> list[float]:
    """After every feature that changes logits, for the token that comes after `request.token_ids`."""
    params, tokens = request.sampling_params, request.token_ids
    output = tokens[request.num_prompt_tokens :]
    new = list(logits)
    if params.allowed_token_ids is not None:
        new = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(new)]
    for word in params.bad_words_token_ids:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            new[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in {*request.eos_token_ids, *params.stop_token_ids}:
            new[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        new[token] = float(np.float32(new[token]) + np.float32(bias))
    for processor in params.logits_processors:
        new = processor(tokens[: request.num_prompt_tokens], output, torch.tensor(new)).tolist()
    for token in set(tokens):
        x = new[token]
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        new[token] = float(np.float32(x))
    forced = forced_token(tokens, request)
    return new if forced is None else [0.0 if token == forced else -math.inf for token in range(len(new))]


def forced_token(tokens: list[int], request: NewRequestData) -> int | None:
    """The next token of the end of a section of reasoning whose budget is used up."""
    params = request.sampling_params
    if params.thinking_token_budget is None or params.thinking_markers is None:
        return None
    start, end = map(list, (params.thinking_markers.start_ids, params.thinking_markers.end_ids))
    starts_open, count = params.thinking_markers.starts_open, 0
    is_inside, since = bool(starts_open), 0 if starts_open is None else request.num_prompt_tokens
    for place in range(since, len(tokens)):
        marker, section = end if is_inside else start, tokens[since : place + 1]
        if section[len(section) - len(marker) :] == marker and len(section) >= len(marker):
            is_inside, since, count = not is_inside, place + 1, 0
        else:
            count += is_inside and place >= request.num_prompt_tokens
    if not is_inside or count < params.thinking_token_budget:
        return None
    section = tokens[since:]
    begun = max(k for k in range(len(end)) if section[len(section) - k :] == end[:k] and k <= len(section))
    return end[begun]


def filtered_logits(logits: list[float], request: NewRequestData) -> list[float]:
    """After the features that shape a random row's distribution."""
    params = request.sampling_params
    new = [float(np.float32(x) / np.float32(params.temperature)) for x in logits]
    probs = probabilities(new)
    new = [x if p >= params.min_p * max(probs) else -math.inf for x, p in zip(new, probs, strict=True)]
    kept = order(new)[: params.top_k or None]
    new = [x if token in kept else -math.inf for token, x in enumerate(new)]
    if params.top_p < 1:
        probs, mass, nucleus = probabilities(new), 0.0, []
        for token in order(new):
            if mass >= params.top_p:
                break
            nucleus.append(token)
            mass += probs[token]
        new = [x if token in nucleus else -math.inf for token, x in enumerate(new)]
    return new


def sample(logits: list[float], request: NewRequestData) -> int:
    """The token that comes after `request.token_ids`."""
    params = request.sampling_params
    new = changed_logits(logits, request)
    if params.greedy:
        return order(new)[0]
    assert params.seed is not None
    u = uniform(params.seed, len(request.token_ids) - request.num_prompt_tokens)
    cumulative = 0.0
    probs = probabilities(filtered_logits(new, request))
    for token, p in enumerate(probs):
        cumulative += p
        if cumulative > u:
            return token
    return max(token for token, p in enumerate(probs) if p > 0)


def reported_logits(logits: list[float], request: NewRequestData, mode: str) -> list[float]:
    """Those that logprobs are about."""
    if mode.startswith("raw"):
        return logits
    new = changed_logits(logits, request)
    return new if request.sampling_params.greedy else filtered_logits(new, request)


def logprobs(
    logits: list[float], chosen: int, params: SamplingParams, mode: str = "raw_logprobs"
) -> tuple[list[int], list[float], list[int]]:
    """Token ids, log-probabilities (or logits) and ranks; the chosen token first."""
    numbers = logits
    if mode.endswith("logprobs"):
        numbers = [math.log(p) if p > 0 else -math.inf for p in probabilities(logits)]
    ranked, count = order(logits), params.logprobs
    ids = [chosen, *(params.logprob_token_ids or (ranked if count == -1 else ranked[:count]))]
    return ids, [numbers[token] for token in ids], [ranked.index(token) + 1 for token in ids]
