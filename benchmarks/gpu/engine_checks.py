# SPDX-License-Identifier: Apache-2.0
"""Checks of whole engines: the same tokens and logprobs whatever is switched on, and nothing lost after many steps.

Invariant: where bits are compared, `--batch-invariant` is on, because the vendor's library adds in an order that
depends on the shape of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import late_checks
from benchmarks.gpu.engine import Engine, Generated, engine, greedy
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import QWEN_05B, TINY_TIED, Shape
from benchmarks.gpu.target import Target

_EAGER = {"enforce_eager": True}
_COMMON: dict[str, Any] = {
    "async_scheduling": False,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 2048,
}


_SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 7,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "logprobs": 2,
}


_GRAPHS: dict[str, dict[str, Any]] = {
    "captured at start": {},
    "captured lazily": {"cuda_graph_capture": "lazy"},
    "verifying guesses": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "overlapped": {"async_scheduling": True},
}
_CHOSEN: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.9, "seed": 7, "min_p": 0.05, "frequency_penalty": 0.3},
)
"""Of every kind that graphs choose tokens for."""


class Expected:
    """Expected outputs of one engine, eager and plain, generated at the first access."""

    def __init__(self, target: Target, model_dir: Path) -> None:
        self.target = target
        self.model_dir = model_dir
        self.prompts = prompts(target)
        self._results: list[Generated] | None = None
        self._chosen: list[Generated] | None = None

    @property
    def results(self) -> list[Generated]:
        if self._results is None:
            with self.engine(**_invariant(self.target), **_EAGER) as running:
                self._results = self.generate(running)
        return self._results

    @property
    def chosen(self) -> list[Generated]:
        """Return the outputs of requests with every kind of sampling that graphs support."""
        if self._chosen is None:
            with self.engine(**_invariant(self.target), **_EAGER) as running:
                self._chosen = self.choose(running)
        return self._chosen

    def engine(self, **args: Any) -> Any:
        return engine(self.target, self.model_dir, **_COMMON | args)

    def choose(self, running: Engine) -> list[Generated]:
        """Kind by kind, and then all kinds in one batch."""
        params = [greedy(6 if self.target.tiny else 24, **kind) for kind in _CHOSEN]
        results = [request for one in params for request in running.generate(self.prompts, one)]
        mixed = [running.add(prompt, params[i % len(params)]) for i, prompt in enumerate(self.prompts)]
        running.finish()
        return results + mixed

    def generate(self, running: Engine) -> list[Generated]:
        return running.generate(self.prompts, greedy(8 if self.target.tiny else 40, logprobs=0))


def prompts(target: Target) -> list[list[int]]:
    """Return prompts of many lengths, with a common prefix that a prefix cache finds."""
    lengths = (1, 7, 40, 65) if target.tiny else (1, 7, 40, 65, 300, 511, 513, 1200)
    vocab = TINY_TIED.vocab if target.tiny else QWEN_05B.vocab
    torch.manual_seed(0)
    common = torch.randint(3, vocab, (32,)).tolist()
    return [(common + torch.randint(3, vocab, (length,)).tolist())[: max(length, 1)] for length in lengths]


def first_checks(target: Target, scratch: Path) -> Iterator[Check]:
    """Yield checks of device-only features: graphs, overlapped steps, leaks, the pinned tier, late compiles."""
    shape, expected = _model(target, scratch)
    for name, args in _GRAPHS.items():
        yield Check(f"{shape.name}: graphs, {name}, same tokens as eager", partial(_graphs, expected, args))
    yield Check(f"{shape.name}: penalties and random sampling, overlapped", partial(_sampled_twice, expected))
    yield Check(f"{shape.name}: memory and blocks after 200 steps", partial(_leaks, expected))
    yield Check(f"{shape.name}: requests that are swapped out and in", partial(_swapped, expected))
    yield Check(f"{shape.name}: int8, same tokens after a sleep", partial(_slept, expected))
    yield from late_checks.checks(target, shape, expected.prompts, _COMMON, scratch)


def _model(target: Target, scratch: Path) -> tuple[Shape, Expected]:
    shape = TINY_TIED if target.tiny else QWEN_05B
    return shape, Expected(target, shape.write(scratch / f"config {shape.name}"))


def checks(target: Target, scratch: Path) -> Iterator[Check]:
    """Variants of one engine beside the plain one, then engines that only have to run."""
    shape, expected = _model(target, scratch)
    eager, invariant = _EAGER, _invariant(target)
    variants: dict[str, dict[str, Any]] = {
        "CUDA graphs": {},
        "CUDA graphs, captured lazily": {"cuda_graph_capture": "lazy"},
        "overlapped steps": {"async_scheduling": True},
        "overlapped steps, eager": {"async_scheduling": True, **eager},
        "chunks of 64 tokens": {"max_num_batched_tokens": 64, **eager},
        "3 at a time": {"max_num_seqs": 3},
        "without prefix caching": {"enable_prefix_caching": False},
    }
    for name, args in variants.items():
        yield Check(
            f"{shape.name}: {name}, same bits as eager", partial(_variant, expected, invariant | args)
        )
    yield Check(f"{shape.name}: one by one, same bits as in a batch", partial(_alone, expected, invariant))
    yield Check(
        f"{shape.name}: seeded sampling, graphs and eager", partial(_sampled, expected, invariant, eager)
    )
    yield Check(
        f"{shape.name}: seeded sampling, overlapped and not",
        partial(_sampled, expected, invariant, {"async_scheduling": True}),
    )
    kinds = ("int8", "int4", "fp8") if target.is_gpu else ("int8", "int4")
    for kind in kinds:
        run = partial(_same_twice, expected, {"quantization": kind})
        yield Check(f"{shape.name}: {kind}, the same tokens twice", run)
    if target.is_gpu:
        run = partial(_same_twice, expected, {"kv_cache_dtype": "fp8"})
        yield Check(f"{shape.name}: fp8 KV cache, the same tokens twice", run)


def _invariant(target: Target) -> dict[str, Any]:
    """On a CPU every engine is; without its own kernels it would refuse the flag."""
    return {"batch_invariant": True} if target.is_gpu else {}


def _different(ours: list[Generated], theirs: list[Generated]) -> float:
    """Requests that did not get the same tokens and logprobs."""
    assert all(request.finish_reason == "length" for request in ours), (
        "a request did not end as it was asked to"
    )
    return float(sum(one != other for one, other in zip(ours, theirs, strict=True)))


def _variant(expected: Expected, args: dict[str, Any]) -> float:
    with expected.engine(**args) as running:
        return _different(expected.generate(running), expected.results)


def _alone(expected: Expected, args: dict[str, Any]) -> float:
    params = greedy(len(expected.results[0].token_ids), logprobs=0)
    with expected.engine(**args) as running:
        alone = [running.generate([prompt], params)[0] for prompt in expected.prompts]
    return _different(alone, expected.results)


def _graphs(expected: Expected, args: dict[str, Any]) -> float:
    with expected.engine(**_invariant(expected.target), **args) as running:
        return _different(expected.choose(running), expected.chosen)


def _sampled(expected: Expected, invariant: dict[str, Any], other: dict[str, Any]) -> float:
    params = greedy(8, **_SAMPLED)
    results = []
    for args in (invariant, invariant | other):
        with expected.engine(**args) as running:
            results.append(running.generate(expected.prompts, params))
    return _different(*results)


def _sampled_twice(expected: Expected) -> float:
    """The same batch after itself, so that steps are alike; and every token is one of the vocabulary."""
    params = greedy(8, **_SAMPLED)
    with expected.engine(async_scheduling=True, enable_prefix_caching=False) as running:
        return _different(*(running.generate(expected.prompts, params) for _ in range(2)))


def _swapped(expected: Expected) -> float:
    """With too few blocks for all, requests go to the host's memory and come back with the same bits."""
    num_tokens = 24 if expected.target.tiny else 200
    num_blocks = 2 + max(-(-(len(prompt) + num_tokens) // 16) for prompt in expected.prompts)
    few = {
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": 16 * (num_blocks - 1),
        "swap_space": 1.0,
        "preemption_mode": "swap",
    }
    results = []
    for args in ({}, few):
        with expected.engine(**_invariant(expected.target), **args, enable_prefix_caching=False) as running:
            results.append(running.generate(expected.prompts, greedy(num_tokens, logprobs=0)))
            num_swapped = running.num_swapped()
    if not num_swapped:
        raise RuntimeError("no request was swapped out, so nothing was checked")
    return _different(*results)


def _slept(expected: Expected) -> float:
    """Compare outputs before and after a sleep: a kernel's own copy of a quantized weight is not moved to the host."""
    with expected.engine(quantization="int8", enable_prefix_caching=False) as running:
        before = expected.generate(running)
        running.sleep()
        return _different(expected.generate(running), before)


def _same_twice(expected: Expected, args: dict[str, Any]) -> float:
    with expected.engine(**args, enable_prefix_caching=False) as running:
        return _different(expected.generate(running), expected.generate(running))


def _leaks(expected: Expected) -> float:
    """Bytes that 200 more steps leave behind, plus blocks in use when nothing runs."""
    params = greedy(5 if expected.target.tiny else 100)
    with expected.engine(enable_prefix_caching=False) as running:
        held = []
        for _ in range(3):
            running.generate(expected.prompts, params)
            expected.target.synchronize()
            held.append(expected.target.allocated_bytes())
        return abs(held[2] - held[0]) + running.check_integrity()
