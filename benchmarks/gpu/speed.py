# SPDX-License-Identifier: Apache-2.0
"""Speed of an engine: decoding, prefill, a full load, and sampling.

Invariant: requests are random tokens, all different, so no prefix is found in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.engine import Engine, Generated, greedy
from benchmarks.gpu.limits import best_of
from benchmarks.gpu.target import Target
from quire.kernels import ops
from quire.kernels.attention_metadata import SamplingLimits

WARM_UP_STEPS = 10
"""Steps before the clock starts: the overlapped loop fills, clocks rise."""


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of equal length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for _ in range(count)]


@contextmanager
def decoding(
    engine: Engine, prompts: list[list[int]], num_steps: int, **params: Any
) -> Iterator[list[Generated]]:
    """Requests that all decode, and go on for so many steps and some more; afterwards they are ended.

    While later prompts are computed the first requests generate already, so contexts differ a little.
    """
    num_tokens = 4 * len(prompts) + 4 * num_steps + 100
    requests = [engine.add(prompt, greedy(num_tokens, **params)) for prompt in prompts]
    while not all(request.token_ids for request in requests):
        engine.step()
    generate(engine, WARM_UP_STEPS * len(requests))
    yield requests
    engine.abort()


def decode_step(
    engine: Engine, prompts: list[list[int]], num_steps: int, **params: Any
) -> tuple[float, float]:
    """Seconds of a step in which all requests decode, and their mean context in the middle of the measurement."""
    with decoding(engine, prompts, num_steps, **params) as requests:
        before = _mean_context(prompts, requests)
        started = time.perf_counter()
        count = generate(engine, num_steps * len(requests))
        seconds = time.perf_counter() - started
        context = (before + _mean_context(prompts, requests)) / 2
    return seconds * len(requests) / count, context


def mixed_step(engine: Engine, prompts: list[list[int]], chunks: list[list[int]]) -> float:
    """Seconds of a step in which requests decode while the prompts of others are computed."""
    with decoding(engine, prompts, 4 * len(chunks)) as requests:
        others = [engine.add(prompt, greedy(1)) for prompt in chunks]
        before, started = len(requests[0].token_ids), time.perf_counter()
        while not all(other.token_ids for other in others):
            engine.step()
        seconds = time.perf_counter() - started
        return seconds / max(len(requests[0].token_ids) - before, 1)


def prefill_rate(engine: Engine, prompts: list[list[int]]) -> float:
    """Prompt tokens per second, one token generated for each prompt."""
    engine.generate([prompts[0][::-1]], greedy(1))
    started = time.perf_counter()
    engine.generate(prompts, greedy(1))
    return sum(map(len, prompts)) / (time.perf_counter() - started)


def output_rate(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Output tokens per second of a batch of requests that all wait from the start."""
    started = time.perf_counter()
    engine.generate(prompts, greedy(num_tokens))
    return len(prompts) * num_tokens / (time.perf_counter() - started)


SAMPLING = {
    "greedy": (0.0, -torch.inf, torch.inf, 1.0),
    "random": (1.0, -torch.inf, torch.inf, 1.0),
    "top_p": (1.0, -torch.inf, torch.inf, 0.95),
    "top_k, top_p": (1.0, -torch.inf, 20.0, 0.8),
}
"""Temperature, ln(min_p), top_k and top_p of a way to choose tokens."""
_REPEATS = 20
"""Calls in a row, so that launching one hides behind the one before, as in the overlapped loop."""


def sampling_step(target: Target, kind: str, batch: int, vocab: int) -> float:
    """Seconds in which tokens are chosen from so many rows of logits, finite ones as a check included."""
    temperature, min_p, top_k, top_p = SAMPLING[kind]
    asked = torch.tensor([(temperature, min_p, min(top_k, vocab), top_p)], dtype=torch.float64)
    settings = asked.repeat(batch, 1).to(target.device)
    logits = 3 * torch.randn(batch, vocab, device=target.device)
    keys = None if temperature == 0.0 else torch.arange(2 * batch, device=target.device).view(batch, 2)
    limits = SamplingLimits(min_p=False, top_k=top_k < vocab, top_p=top_p < 1.0)

    def run() -> None:
        for _ in range(_REPEATS):
            ops.clear_rows(logits, ops.unusable_rows(logits))
            ops.sample_tokens(logits, settings, keys, limits)

    run()
    return best_of(target, run, 3) / _REPEATS


def logprobs_step(target: Target, num_top: int, batch: int, vocab: int) -> float:
    """Seconds in which logprobs of so many rows of logits are made."""
    logits = 3 * torch.randn(batch, vocab, device=target.device)
    chosen = torch.arange(batch, device=target.device) % vocab

    def run() -> None:
        for _ in range(_REPEATS):
            ops.token_logprobs(logits, chosen, num_top)

    run()
    return best_of(target, run, 3) / _REPEATS


def generate(engine: Engine, wanted: int) -> int:
    """Step until at least so many tokens came out; returns how many did."""
    count = 0
    while count < wanted:
        count += engine.step()
    return count


def _mean_context(prompts: list[list[int]], requests: list[Generated]) -> float:
    total = sum(map(len, prompts)) + sum(len(request.token_ids) for request in requests)
    return total / len(prompts)
