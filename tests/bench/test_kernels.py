# SPDX-License-Identifier: Apache-2.0
"""Kernel measurements: shares of limits are what the numbers say."""

from __future__ import annotations

import itertools

import pytest

from quire.bench import kernels
from quire.bench.kernels import AttentionShape, KernelsResult, MachineLimits, ModelShape, measure_case
from quire.bench.workload import KernelCase

LIMITS = MachineLimits(threads=2, flops=100e9, bandwidth=10e9)


def ticking(step: float) -> itertools.count[float]:
    return itertools.count(0.0, step)


@pytest.mark.parametrize(
    ("flops", "num_bytes", "share", "bound"),
    [(10e9, 0.1e9, 0.5, "arithmetic"), (1e9, 1e9, 0.5, "memory")],
)
def test_share_of_the_limit(flops: float, num_bytes: float, share: float, bound: str) -> None:
    clock = ticking(0.2)
    result = measure_case(
        KernelCase("op", 4, lambda: None, flops, num_bytes), LIMITS, 0.2, lambda: next(clock)
    )
    assert result.seconds == pytest.approx(0.2)
    assert result.of_limit == pytest.approx(share)
    assert result.bound == bound
    assert f"{share:.0%} of {bound}" in result.line()


def test_linear_cases_count_flops_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_COLD_BYTES", 2**16)
    shape = ModelShape(hidden=32, qkv=48, intermediate=64, vocab=100)
    cases = {case.name: case for case in kernels.linear_cases(shape, [3], ["bfloat16"])}
    assert list(cases) == [f"{name} bfloat16" for name in ("qkv", "o", "gate_up+silu", "down", "lm_head")]
    qkv = cases["qkv bfloat16"]
    assert qkv.flops == 2 * 3 * 48 * 32
    assert qkv.num_bytes == 2 * 48 * 32 + 4 * 3 * (32 + 48)
    qkv.run()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_attention_cases_count_flops_and_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_POOL_BYTES", 2**16)
    shape, dtype = AttentionShape(4, 2, 16), kernels.DTYPES[name]
    case = kernels.attention_case("decode", shape, dtype, 3, 1, 40)
    assert case.flops == 3 * 40 * 4 * 16 * 4
    stored = 16 + 4 if name == "int8" else 16
    assert case.num_bytes == 3 * 48 * 2 * 2 * stored * dtype.itemsize + 2 * 3 * 4 * 16 * 4
    case.run()
    prefill = kernels.attention_case("prefill", shape, dtype, 1, 5, 5)
    assert (prefill.rows, prefill.flops) == (5, 15 * 4 * 16 * 4)
    prefill.run()


def test_the_table_names_the_limits() -> None:
    lines = KernelsResult(LIMITS, []).lines()
    assert lines[0].startswith("2 threads: 100.0 GFLOP/s multiply-add, 10.0 GB/s read")
