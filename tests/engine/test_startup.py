# SPDX-License-Identifier: Apache-2.0
"""`prepare`: what it settles and refuses about kernels."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.start_feature import Usage
from quire.engine.startup import DEFAULT_MAX_NUM_SEQS, MAX_ROUNDS, prepare
from quire.engine.without_effect import without_effect
from quire.errors import ConfigError
from quire.kernels import cpu
from tests.fixtures.folded import folded


def prepared(**args: Any) -> EngineConfig:
    return prepare(EngineConfig.from_args(device="cpu", **args), "offline")


def test_batch_invariance_changes_nothing_on_a_cpu_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: True)
    with caplog.at_level(logging.INFO, "quire"):
        assert prepared(batch_invariant=True).kernels.batch_invariant
    assert "batch_invariant: changes nothing" in caplog.text


def test_batch_invariance_with_torch_reference_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    prepared()
    with pytest.raises(ConfigError, match=r"--batch-invariant needs the C\+\+ kernels on a CPU"):
        prepared(batch_invariant=True)


@pytest.mark.parametrize(
    ("dtype", "native", "matters"),
    [
        ("bfloat16", True, True),
        ("float32", True, False),
        ("float16", True, False),
        ("bfloat16", False, False),
    ],
)
def test_matmul_precision_without_effect_is_logged(
    dtype: str, native: bool, matters: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: native)
    prepared(dtype=dtype)
    assert prepared(dtype=dtype, matmul_precision="medium").kernels.matmul_precision == "medium"
    assert ("matmul_precision: changes nothing" in caplog.text) is not matters


def test_fp8_weights_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 needs a GPU"):
        prepared(quantization="fp8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"cudagraph_capture_sizes": (1, 2)}, "there are no CUDA graphs on a CPU"),
        ({"cuda_graph_capture": "lazy"}, "there are no CUDA graphs on a CPU"),
        ({"fair_weights": {"a": 2}}, "--scheduling-policy is fcfs"),
        (
            {"fair_output_token_weight": 3.0, "scheduling_policy": "priority"},
            "--scheduling-policy is priority",
        ),
        ({"priority_ageing_s": 1.0}, "--scheduling-policy is fcfs"),
        ({"preemption_mode": "recompute"}, "there is no --swap-space"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_option_without_effect_is_logged(
    args: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(**args)
    assert f"{next(iter(args))}: changes nothing, {said}" in caplog.text


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"scheduling_policy": "fair", "fair_weights": {"a": 2}},
        {"scheduling_policy": "priority", "priority_ageing_s": 1.0},
        {"scheduler_cls": "my.module:Mine", "priority_ageing_s": 1.0},
        {"swap_space": 1.0, "preemption_mode": "swap"},
        {"cpu_threads": 1},
    ],
)
def test_an_option_with_an_effect_is_not_talked_about(
    args: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prepared(**args)
    assert "changes nothing" not in caplog.text


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"cpu_threads": 1, "cpu_pin_threads": True}, {"cpu_threads", "cpu_pin_threads"}),
        ({"enforce_eager": True, "cuda_graph_capture": "lazy"}, {"cuda_graph_capture"}),
        ({"cuda_graph_capture": "lazy", "cudagraph_capture_sizes": (1,)}, set()),
    ],
)
def test_options_without_effect_on_a_gpu_are_listed(args: dict[str, Any], expected: set[str]) -> None:
    config = EngineConfig.from_args(device="cuda", dtype="bfloat16", **args)
    assert {field for field, _ in without_effect(config)} == expected


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"device": "cuda", "dtype": "bfloat16"}, "a GPU works while the host plans"),
        ({"async_scheduling": True}, "--async-scheduling plans while others are computed"),
        ({"tensor_parallel_size": 2}, "several ranks end a step together"),
        ({"pipeline_parallel_size": 2, "async_scheduling": False}, "several ranks end a step together"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "--speculative-config guesses",
        ),
        ({"enforce_eager": True}, "--enforce-eager records no steps"),
        ({"runner": "pooling"}, "a pooled model generates nothing"),
    ],
)
def test_multi_step_is_refused_with_the_reason_for_single_steps(
    args: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: True)
    args = {"device": "cpu", **args}
    for usage in ("offline", "server"):
        assert prepare(EngineConfig.from_args(**args), usage).scheduler.num_scheduler_steps == 1
    with pytest.raises(ConfigError, match=f"--num-scheduler-steps is 4, and {reason}"):
        prepare(EngineConfig.from_args(**args, num_scheduler_steps=4), "offline")
    assert prepare(EngineConfig.from_args(**args, num_scheduler_steps=1), "offline")


@pytest.mark.parametrize(
    ("asked", "usage", "expected"),
    [
        ({}, "offline", (MAX_ROUNDS, 0.5, False)),
        ({}, "server", (MAX_ROUNDS, 0.02, None)),
        ({"num_scheduler_steps": 3}, "offline", (3, 0.5, None)),
        ({"num_scheduler_steps": 3}, "server", (3, 0.5, None)),
        ({"num_scheduler_steps": 1}, "server", (1, 0.0, None)),
        ({"max_multi_step_s": 0.1}, "server", (MAX_ROUNDS, 0.1, None)),
        ({"max_multi_step_s": 0.1, "num_scheduler_steps": 3}, "offline", (3, 0.1, None)),
        ({"multi_step_streams": False}, "server", (MAX_ROUNDS, 0.02, False)),
        ({"multi_step_streams": True}, "offline", (MAX_ROUNDS, 0.5, True)),
        ({"distributed_executor_backend": "mp"}, "server", (1, 0.0, None)),
    ],
)
def test_a_plan_has_several_tokens_for_so_long(
    asked: dict[str, Any],
    usage: Usage,
    expected: tuple[int, float, bool | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: True)
    found = prepare(EngineConfig.from_args(device="cpu", **asked), usage).scheduler
    assert (found.num_scheduler_steps, found.max_multi_step_s, found.multi_step_streams) == expected


def test_without_kernels_a_plan_has_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert prepared().scheduler.num_scheduler_steps == 1


@pytest.mark.more
def test_an_engine_on_a_cpu_loads_nothing_of_torchs_compiler() -> None:
    """It takes longer to import than the included model to load."""
    program = (
        "import sys\nfrom quire import LLM, SamplingParams\n"
        "LLM('quire-demo', device='cpu').generate([[5, 6]] * 2, SamplingParams(max_tokens=3), use_tqdm=False)\n"
        "print([name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A directory with the config of a tiny BERT."""
    values = {
        "architectures": ["BertModel"],
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_an_encoder_computes_texts_whole(encoder: Path) -> None:
    config = prepared(model=str(encoder))
    assert not config.scheduler.enable_chunked_prefill
    assert not config.cache.enable_prefix_caching
    assert prepared(model=str(encoder), max_num_batched_tokens=512).model.max_model_len == 512


def test_encoder_with_texts_beyond_a_step_is_refused(encoder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--max-num-batched-tokens is 500, but an encoder .* up to 512 tokens"
    ):
        prepared(model=str(encoder), max_num_batched_tokens=500)


@folded("usage", ["offline", "server"])
@folded("tokens", [1, 64, 4096])
def test_max_num_seqs_unset_is_at_most_max_num_batched_tokens(usage: Usage, tokens: int) -> None:
    config = prepare(EngineConfig.from_args(max_num_batched_tokens=tokens), usage)
    assert config.scheduler.max_num_seqs == min(tokens, DEFAULT_MAX_NUM_SEQS[usage])
    with pytest.raises(ConfigError, match="max-num-seqs"):
        prepare(EngineConfig.from_args(max_num_batched_tokens=tokens, max_num_seqs=tokens + 1), usage)
