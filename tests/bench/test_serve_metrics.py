# SPDX-License-Identifier: Apache-2.0
"""Serving metrics on known numbers."""

from __future__ import annotations

import json
import math

import pytest

from quire.bench.serve import RequestRecord, ServeResult, peak_concurrency, peak_tokens_per_s

FAST = RequestRecord(0.0, [0.1, 0.2, 0.4], 0.4, num_prompt_tokens=10, num_output_tokens=4)
SLOW = RequestRecord(0.5, [0.8, 1.8], 2.0, num_prompt_tokens=20, num_output_tokens=2)
ONE_TOKEN = RequestRecord(1.0, [1.5], 1.5, num_prompt_tokens=5, num_output_tokens=1)
FAILED = RequestRecord(0.0, [0.1], 0.2, error="the server answered 500: broken")
RESULT = ServeResult([FAST, SLOW, ONE_TOKEN, FAILED], 2.0, math.inf, None)


def test_times() -> None:
    times = RESULT.times_ms()
    assert times["ttft"] == pytest.approx([100, 300, 500])
    assert times["tpot"] == pytest.approx([100, 1000]), (
        "no time per token after the first where there is only one"
    )
    assert times["itl"] == pytest.approx([100, 200, 1000])


def test_json() -> None:
    content = RESULT.as_json()
    assert content == pytest.approx(
        {
            "duration": 2.0,
            "completed": 3,
            "failed": 1,
            "total_input_tokens": 35,
            "total_output_tokens": 7,
            "request_throughput": 1.5,
            "output_throughput": 3.5,
            "total_token_throughput": 21.0,
            "max_output_tokens_per_s": 5.0,
            "max_concurrent_requests": 2,
            "request_rate": None,
            "max_concurrency": None,
            "mean_ttft_ms": 300,
            "median_ttft_ms": 300,
            "std_ttft_ms": 163.29931618554522,
            "p99_ttft_ms": 496,
            "mean_tpot_ms": 550,
            "median_tpot_ms": 550,
            "std_tpot_ms": 450,
            "p99_tpot_ms": 991,
            "mean_itl_ms": 433.3333333333333,
            "median_itl_ms": 200,
            "std_itl_ms": 402.76819911981905,
            "p99_itl_ms": 984,
        }
    )
    json.dumps(content, allow_nan=False)


def test_text_has_field_names_and_omits_unset_values() -> None:
    text = "\n".join(RESULT.lines())
    for name in (
        "Successful requests:",
        "Benchmark duration (s):",
        "Total generated tokens:",
        "P99 ITL (ms):",
    ):
        assert name in text
    assert "Mean TTFT (ms):                             300.00" in text
    assert "Maximum request concurrency" not in text
    limited = "\n".join(ServeResult([FAST], 2.0, 4.0, 8).lines())
    assert "Maximum request concurrency:" in limited
    assert "Request rate configured (RPS):                4.00" in limited


def test_nothing_succeeded() -> None:
    content = ServeResult([FAILED], 1.0, 2.0, 3).as_json()
    assert (content["completed"], content["failed"], content["mean_ttft_ms"]) == (0, 1, 0.0)


def test_peaks() -> None:
    assert peak_concurrency([]) == 0
    assert peak_concurrency([RequestRecord(0.0, end_s=1.0), RequestRecord(1.0, end_s=2.0)]) == 1
    assert peak_concurrency([RequestRecord(0.0, end_s=3.0), RequestRecord(1.0, end_s=2.0)]) == 2
    assert peak_tokens_per_s([]) == 0.0
    assert peak_tokens_per_s([SLOW]) == 1.0
