# SPDX-License-Identifier: Apache-2.0
"""Limits of the device: its memory bandwidth and arithmetic, measured, and a model's best rates from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.target import Target

BYTES_PER_VALUE = 2
"""Of bfloat16, the precision of the table."""


@dataclass(frozen=True)
class Weights:
    """Bytes that a weight takes, its scales included, in the layers and in the head."""

    layers: float
    head: float

    def num_bytes(self, shape: Shape) -> float:
        """Return the bytes of all weights that a token is multiplied with."""
        head = shape.vocab * shape.hidden
        return (shape.num_multiplied - head) * self.layers + head * self.head


BFLOAT16 = Weights(BYTES_PER_VALUE, BYTES_PER_VALUE)


@dataclass(frozen=True)
class Limits:
    """Measured limits of a device."""

    bytes_per_s: float
    """Of a large copy, what is read and what is written counted."""
    flops_per_s: float
    """Of a large bfloat16 matrix product."""

    def seconds(self, num_bytes: float, operations: float) -> float:
        """Reading so much beside so many operations, of which the slower one counts."""
        return max(num_bytes / self.bytes_per_s, operations / self.flops_per_s)

    def decode_s(self, shape: Shape, batch: int, context: float, weights: Weights = BFLOAT16) -> float:
        """A decode step: every weight and every cached value is read once."""
        return (weights.num_bytes(shape) + batch * self.context_bytes(shape, context)) / self.bytes_per_s

    def context_bytes(self, shape: Shape, context: float) -> float:
        """Cached keys and values of a request."""
        return context * shape.kv_values_per_token * BYTES_PER_VALUE

    def prefill_tokens_per_s(self, shape: Shape, length: int) -> float:
        """Prompts of a length: two operations per weight, but the head, and causal attention."""
        linears = 2 * (shape.num_multiplied - shape.vocab * shape.hidden)
        attention = 2 * shape.num_layers * shape.heads * shape.head_size * length
        return self.flops_per_s / (linears + attention)


def measure_limits(target: Target) -> Limits:
    """Best of several runs of a copy and of a product."""
    size, side = (1 << 16, 64) if target.tiny else (1 << 30, 8192)
    source, copy = (torch.empty(size, dtype=torch.bfloat16, device=target.device) for _ in range(2))
    copy_s = best_of(target, lambda: copy.copy_(source))
    left, right = (torch.randn(side, side, device=target.device).to(torch.bfloat16) for _ in range(2))
    product_s = best_of(target, lambda: left @ right)
    return Limits(2 * source.nbytes / copy_s, 2 * side**3 / product_s)


def best_of(target: Target, run: Callable[[], object], num_runs: int = 10) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(num_runs):
        target.synchronize()
        started = time.perf_counter()
        run()
        target.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)
