"""`prepare`: what it settles and refuses about kernels."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.startup import prepare
from quire.errors import ConfigError
from quire.kernels import cpu


def prepared(**args: Any) -> EngineConfig:
    return prepare(EngineConfig.from_args(device="cpu", **args), "offline")


def test_batch_invariance_changes_nothing_on_a_cpu_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: True)
    with caplog.at_level(logging.INFO, "quire"):
        assert prepared(batch_invariant=True).kernels.batch_invariant
    assert "batch_invariant: changes nothing" in caplog.text


def test_batch_invariance_is_refused_where_only_the_torch_reference_runs(
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
def test_a_precision_of_products_that_changes_nothing_is_said(
    dtype: str, native: bool, matters: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: native)
    prepared(dtype=dtype)
    assert prepared(dtype=dtype, matmul_precision="medium").kernels.matmul_precision == "medium"
    assert ("matmul_precision: changes nothing" in caplog.text) is not matters


def test_fp8_weights_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 needs a GPU"):
        prepared(quantization="fp8")
