# SPDX-License-Identifier: Apache-2.0
"""A step from the inside: every op of it is listed, with what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.bench import step_profile
from quire.bench.step_profile import OpTime, StepProfile
from quire.engine import startup
from quire.kernels import cpu

if not cpu.available():
    pytest.skip("no kernels, no tapes", allow_module_level=True)


def test_a_step_is_the_sum_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "NUM_STEPS", 2)
    monkeypatch.setattr(startup, "MAX_MULTI_STEP_S", 1000.0)
    monkeypatch.setattr(
        step_profile,
        "SHAPE",
        step_profile.SHAPE | {"hidden_size": 64, "vocab_size": 512, "intermediate_size": 128},
    )
    monkeypatch.setattr(step_profile, "SHAPE", step_profile.SHAPE | {"num_attention_heads": 4})
    (step,) = step_profile.measure(["int8"], [2], threads=1, quick=True).results
    calls = {op.name: op.calls for op in step.ops}
    assert calls["packed_linear 256x64"] == 1  # gate and up
    assert calls["packed_linear 64x128"] == calls["paged_attention"] == 1
    read = {op.name: op.num_bytes for op in step.ops}
    assert read["packed_linear 64x128"] == 64 * 128 + 2 * 64 * 128 // 32
    assert sum(op.seconds for op in step.ops) == pytest.approx(step.step_s)
    assert calls["packed_linear 512x64"] == calls["sample_tokens"] == 0.5, (
        "the second of two is a further round"
    )
    linears = sum(size for name, size in read.items() if name.startswith("packed_linear"))
    assert step.weight_bytes == linears + 512 * 64 / 2


@pytest.mark.parametrize(
    ("name", "op", "states"),
    [
        ("bamba", "ssd_scan", 8 * 16 * 4),
        ("mamba", "selective_scan", 2 * 64 * 8),
        ("qwen3next", "gated_delta", 8 * 16 * 16),
    ],
)
def test_states_are_read_and_written(
    name: str, op: str, states: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "NUM_STEPS", 2)
    (step,) = step_profile.measure(["float32"], [3], model=tiny_model(name), threads=1, quick=True).results
    (found,) = (one for one in step.ops if one.name == op)
    assert found.num_bytes == found.calls * 2 * 4 * 3 * states
    assert step.state_bytes == found.num_bytes


def test_step_counts_bytes_of_selected_experts_only(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "NUM_STEPS", 2)
    directory = tiny_model("qwen3moe")
    config = json.loads((directory / "config.json").read_text())
    matrices = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    (step,) = step_profile.measure(["float32"], [1], model=directory, threads=1, quick=True).results
    (found,) = (one for one in step.ops if one.name == "experts")
    assert found.num_bytes == found.calls * config["num_experts_per_tok"] * 4 * matrices


def test_step_lines_show_shares_of_the_probed_bandwidth() -> None:
    step = StepProfile("int8", 1, [OpTime("op", 2, 0.5e-3, 1e6)], 1e-3, 8 * 10**6, 2 * 10**6, 20e9)
    assert step.of_probe == 0.5
    first, _, op = step.lines()
    assert "8 MB of weights and moves 2 MB of states: 50% of the 20.0 GB/s" in first
    assert op.split() == ["op", "2", "500.0", "2.0", "50.0%"]
