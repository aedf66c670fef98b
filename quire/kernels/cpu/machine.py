# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine, measured with the kernels' instructions and number of threads."""

import time

import torch

from quire.kernels.cpu.calls import call

_FMA_ITERATIONS = 2_000_000


def peak_flops() -> float:
    """Return floating-point operations per second in a loop of independent multiply-adds."""
    out = torch.empty(1)
    started = time.perf_counter()
    operations = call("peak_fma", (out,), _FMA_ITERATIONS)
    return operations / (time.perf_counter() - started)


def read_buffer(mebibytes: int = 256) -> torch.Tensor:
    """Return touched memory for `read_bandwidth`; by default far larger than the caches."""
    return torch.ones(mebibytes * 2**20, dtype=torch.uint8)


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Return bytes per second of reading a buffer once."""
    out = torch.empty(1)
    started = time.perf_counter()
    num_bytes = call("read_memory", (out, buffer), buffer.nbytes)
    return num_bytes / (time.perf_counter() - started)
