# SPDX-License-Identifier: Apache-2.0
"""The sampler in plain Python, one row at a time."""

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
    last_n = params.repeat_last_n
    window_start = max(0, len(tokens) - last_n) if last_n >= 0 else 0
    output = tokens[max(window_start, request.num_prompt_tokens) :]
    for token in set(tokens[window_start:]):
        x = new[token]
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        new[token] = float(np.float32(x))
    for token, penalty in dry_penalties(tokens, params).items():
        new[token] = float(np.float32(new[token] - penalty))
    forced = forced_token(tokens, request)
    return new if forced is None else [0.0 if token == forced else -math.inf for token in range(len(new))]


def dry_penalties(tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """Every token that stands behind an earlier copy of the text's end, and what the longest such copy costs it."""
    if params.dry_multiplier == 0 or params.dry_base < 1 or params.dry_penalty_last_n == 0:
        return {}
    window = tokens[-params.dry_penalty_last_n :] if params.dry_penalty_last_n > 0 else list(tokens)
    breakers = [[head, *one.tail] for one in params.dry_breakers for head in one.heads]
    limit = len(window)
    for start in reversed(range(len(window))):
        ends = [start + len(b) for b in breakers if window[start : start + len(b)] == b]
        if ends:
            limit = len(window) - max(ends)
            break
    longest: dict[int, int] = {}
    if len(window) <= params.dry_allowed_length or limit < params.dry_allowed_length:
        return {}
    for place in range(len(window) - 1):
        length = 0
        while length <= place and window[place - length] == window[len(window) - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= params.dry_allowed_length:
            longest[window[place + 1]] = max(longest.get(window[place + 1], 0), length)
    exponent = {token: length - params.dry_allowed_length for token, length in longest.items()}
    free = {breaker[0] for breaker in breakers if len(breaker) == 1}
    return {t: params.dry_multiplier * params.dry_base**e for t, e in exponent.items() if t not in free}


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


Candidates = list[tuple[int, float]]
"""(token, logit), from the most to the least likely, as llama.cpp keeps them."""


def probs_of(candidates: Candidates) -> list[float]:
    return probabilities([logit for _, logit in candidates])


def entropy(candidates: Candidates) -> float:
    return -sum(p * math.log(p) for p in probs_of(candidates))


def chain(logits: list[float], request: NewRequestData, mu: float | None) -> Candidates:
    """Return the candidates that llama.cpp's samplers leave, in its default order."""
    params = request.sampling_params
    left: Candidates = [(token, logits[token]) for token in order(logits) if logits[token] > -math.inf]
    if params.mirostat:
        left = [(token, logit / params.temperature) for token, logit in left]
        mu = 2 * params.mirostat_tau if mu is None else mu
        return left[
            : mirostat_1_count(left, mu, len(logits)) if params.mirostat == 1 else mirostat_2_count(left, mu)
        ]
    if params.top_n_sigma > 0:
        values = np.array([logit for _, logit in left])
        left = [one for one in left if one[1] >= values.max() - params.top_n_sigma * values.std()]
    left = left[: params.top_k or None]
    if params.typical_p < 1:
        probs, target, mass, kept = probs_of(left), entropy(left), 0.0, list[int]()
        for place in sorted(range(len(left)), key=lambda place: abs(-math.log(probs[place]) - target)):
            kept.append(place)
            mass += probs[place]
            if mass > params.typical_p:
                break
        left = [left[place] for place in sorted(kept)]
    if params.top_p < 1:
        masses = np.cumsum(probs_of(left))
        left = left[: int((masses < params.top_p).sum()) + 1]
    left = [
        one for one, p in zip(left, probs_of(left), strict=True) if p >= params.min_p * max(probs_of(left))
    ]
    place = len(request.token_ids) - request.num_prompt_tokens
    chance = uniform(params.seed or 0, 2**62 + place)
    if params.xtc_probability > 0 and chance <= params.xtc_probability and params.xtc_threshold <= 0.5:
        num_above = sum(p >= params.xtc_threshold for p in probs_of(left))
        left = left[max(num_above - 1, 0) :]
    temperature = params.temperature
    if params.dynatemp_range > 0:
        low, high = max(0.0, temperature - params.dynatemp_range), temperature + params.dynatemp_range
        share = entropy(left) / math.log(len(left)) if len(left) > 1 else 0.0
        temperature = max(low + (high - low) * share**params.dynatemp_exponent, 0.01)
    return [(token, logit / (temperature or 1.0)) for token, logit in left]


def mirostat_1_count(left: Candidates, mu: float, vocab_size: int) -> int:
    pairs = list(zip(probs_of(left)[:100], probs_of(left)[1:100], strict=False))
    steps = [math.log((i + 2) / (i + 1)) for i in range(len(pairs))]
    if not pairs:
        return 1
    s = sum(t * math.log(p / q) for t, (p, q) in zip(steps, pairs, strict=True)) / sum(t * t for t in steps)
    k = ((s - 1) * 2**mu / (1 - vocab_size ** -(s - 1))) ** (1 / s)
    return max(int(min(k, 1e9)), 1)


def mirostat_2_count(left: Candidates, mu: float) -> int:
    return max(sum(-math.log2(p) <= mu for p in probs_of(left)), 1)


def next_mu(logits: list[float], request: NewRequestData, mu: float | None, chosen: int) -> float:
    """Mirostat's mu behind a token that was chosen with this one."""
    params = request.sampling_params
    left = chain(changed_logits(logits, request), request, mu)
    surprise = -math.log2(probs_of(left)[[token for token, _ in left].index(chosen)])
    return (2 * params.mirostat_tau if mu is None else mu) - params.mirostat_eta * (
        surprise - params.mirostat_tau
    )


def filtered_logits(logits: list[float], request: NewRequestData, mu: float | None = None) -> list[float]:
    """After the features that shape a random row's distribution."""
    params = request.sampling_params
    if params.has_sampler_chain:
        left = dict(chain(logits, request, mu))
        return [float(np.float32(left.get(token, -math.inf))) for token in range(len(logits))]
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


def sample(logits: list[float], request: NewRequestData, mu: float | None = None) -> int:
    """The token that comes after `request.token_ids`."""
    params = request.sampling_params
    new = changed_logits(logits, request)
    if params.greedy:
        return order(filtered_logits(new, request) if params.has_sampler_chain else new)[0]
    assert params.seed is not None
    u = uniform(params.seed, len(request.token_ids) - request.num_prompt_tokens)
    cumulative = 0.0
    probs = probabilities(filtered_logits(new, request, mu))
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
    params = request.sampling_params
    return new if params.greedy and not params.has_sampler_chain else filtered_logits(new, request)


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
