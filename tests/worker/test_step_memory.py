# SPDX-License-Identifier: Apache-2.0
"""Tests of a step's memory bound, which is known before the cache is made and never exceeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.cpu import linear
from quire.sampling_params import SamplingParams
from quire.worker.stage_sizes import LOGITS_ARRAYS, AllocationPeak, ForwardPeak
from tests.models.harness import prepared_config
from tests.worker.test_worker import GIB, driver_of, loaded

FLOATS = 4


def test_peak_counts_tensors_alive_together() -> None:
    with AllocationPeak() as peak:
        first = torch.zeros(1000)
        second = first + 1
        del first
        assert peak.bytes == 2000 * FLOATS
        third = torch.cat([second, second])
        assert peak.bytes == 3000 * FLOATS
        del second, third
        torch.zeros(2999)
    assert peak.bytes == 3000 * FLOATS


def test_views_and_changes_in_place_are_no_allocations() -> None:
    before = torch.zeros(10, 100)
    with AllocationPeak() as peak:
        kept = [before.t(), before[2:], before.view(-1), before.add_(1), torch.add(before, 1, out=before)]
    assert peak.bytes == 0
    del kept


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_no_step_takes_more_than_was_left_for_it(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step there can be, with penalties and logprobs for every row."""
    monkeypatch.setattr(linear, "SCRATCH", linear._Scratch())  # kept by the process, and so by other tests
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    config = prepared_config(tiny_model(name), enforce_eager=True, **limits)
    left = loaded(config.evolve(gpu_memory_utilization=1.0)).kv_memory().free_bytes
    driver = driver_of(config)
    params = SamplingParams(
        seed=3, temperature=0.8, top_p=0.95, top_k=20, max_tokens=9, logprobs=5, presence_penalty=1.0
    )
    for number in range(4):
        driver.submit(f"r{number}", [(7 * i + number) % 250 for i in range(32)], params)
    with AllocationPeak() as peak:
        driver.step({f"r{number}": 32 for number in range(4)})
    assert peak.bytes <= GIB - left <= 3 * peak.bytes


def test_a_bound_for_more_tokens_and_rows() -> None:
    forward_peak = ForwardPeak()
    assert forward_peak.bytes_of_step(64, 10) == LOGITS_ARRAYS * 10 * FLOATS
    for num_tokens in (32, 8):
        inputs = SimpleNamespace(input_ids=torch.zeros(num_tokens))
        forward_peak.measured(lambda inputs: torch.zeros(len(inputs.input_ids), 25))(inputs)  # type: ignore[arg-type]
    assert forward_peak.bytes_of_step(64, 10) == (64 * 25 + LOGITS_ARRAYS * 10) * FLOATS
