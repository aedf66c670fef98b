# SPDX-License-Identifier: Apache-2.0
"""The included model stays near float32, in every way of keeping it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import activations
from benchmarks.accuracy import MODES, measure, quantized
from quire.config import DEMO_MODEL
from quire.quantize.grid import IntegerGrid

BOUNDS = {
    "bf16": (1e-3, 0.001, 0.995),
    "bf16, auto": (0.01, 0.02, 0.98),
    "bf16, int8 cache": (0.02, 0.05, 0.97),
    "int8 precise": (0.03, 0.08, 0.95),
    "int8 fast": (0.04, 0.1, 0.95),
    "int8 fast, int8 cache": (0.04, 0.1, 0.95),
    "int4 precise": (0.3, 0.8, 0.7),
    "int4 fast": (0.3, 0.8, 0.7),
    "int4 fast, int4 head": (0.4, 1.0, 0.6),
}
"""Largest relative error and distance of logprobs, and the least agreement."""


def test_every_mode_keeps_its_bounds_on_the_model_in_the_box() -> None:
    results = {result.mode: result for result in measure(DEMO_MODEL, list(MODES), 4, 48)}
    assert results.keys() == BOUNDS.keys()
    for mode, (error, distance, agreement) in BOUNDS.items():
        found = results[mode]
        assert found.relative_error <= error, found
        assert found.mean_logprob_distance <= distance, found
        assert found.top1_agreement >= agreement, found


def test_methods_of_quire_quantize_are_written_and_measured(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(tiny_model("llama"))
    also = quantized(model, ["rtn"], IntegerGrid(8, 32), 1, tmp_path)
    exact, rounded = measure(model, ["bf16"], 1, 12, also)
    assert rounded.mode == "rtn"
    assert exact.relative_error < rounded.relative_error < 0.1


@pytest.mark.more
def test_quire_activation_rounding_costs_less_than_checkpoints() -> None:
    errors = activations.measure(DEMO_MODEL, 2, 24)
    ours = [errors.pop(name) for name in list(errors) if name.startswith("quire")]
    assert len(ours) == 2
    assert max(ours) < min(errors.values())
