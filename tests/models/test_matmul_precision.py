# SPDX-License-Identifier: Apache-2.0
"""`--matmul-precision` on a CPU: which bfloat16 layers round their activations, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kernels.cpu import library
from quire.layers.matrix import MatrixLayer
from tests.models.harness import load_tiny

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)


@pytest.mark.parametrize(
    ("asked", "dtype", "multiplies", "rounds"),
    [
        ("auto", "bfloat16", True, True),
        ("auto", "bfloat16", False, False),
        ("medium", "bfloat16", True, True),
        ("highest", "bfloat16", True, False),
        ("auto", "float32", True, False),
        ("medium", "float32", False, False),
        ("auto", "float16", True, False),
    ],
)
def test_activations_are_rounded_if_faster_or_requested(
    asked: str,
    dtype: str,
    multiplies: bool,
    rounds: bool,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: multiplies)
    with caplog.at_level(logging.INFO, "quire"):
        model = load_tiny(tiny_model("llama"), dtype=dtype, matmul_precision=asked)
    layers: list[Any] = [layer for _, layer in model.checkpoint_layers() if isinstance(layer, MatrixLayer)]
    packed = [layer.packed for layer in layers if layer.packed is not None]
    assert packed
    assert {one.scheme.fast for one in packed} == {rounds}
    assert ("matmul_precision is medium" in caplog.text) is (rounds and asked == "auto")


def test_rounding_that_gains_nothing_is_refused(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=r"matmul-precision medium .* AVX512-BF16 or AMX alone; here are C"):
        load_tiny(tiny_model("llama"), dtype="bfloat16", matmul_precision="medium")


def test_those_that_multiply_bfloat16_are_known_by_name() -> None:
    loaded = library.loaded()
    assert loaded is not None
    assert cpu.multiplies_bfloat16() is (loaded.isa in ("avx512bf16", "amx"))
