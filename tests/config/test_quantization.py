# SPDX-License-Identifier: Apache-2.0
"""`QuantizationConfig`: what it means, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import QuantizationConfig
from quire.errors import ConfigError
from tests.fixtures.folded import folded


def test_defaults() -> None:
    config = QuantizationConfig(quantization="int4")
    assert (config.group_size("int4", "cpu"), config.group_size("int4", "cuda")) == (32, 32)
    assert (config.group_size("int8", "cpu"), config.group_size("int8", "cuda")) == (32, 0)
    assert (config.symmetric, config.fast, config.ignore) == (True, True, ())


def test_every_key_is_read() -> None:
    given = {"group_size": 128, "symmetric": False, "mode": "precise", "ignore": ["lm_head"]}
    config = QuantizationConfig("int4-plain", given)
    assert {config.group_size(kind, device) for kind in ("int8", "int4") for device in ("cpu", "cuda")} == {
        128
    }
    assert (config.symmetric, config.fast, config.ignore) == (False, False, ("lm_head",))
    config.check("cpu")


@folded(
    ("given", "message"),
    [
        (
            {"groupsize": 32},
            "unknown key 'groupsize'; known are group_size, symmetric, mode, scale, gemm, head, ignore",
        ),
        ({"group_size": 48}, "group_size must be one of 0, 32, 64, 128, got 48"),
        ({"symmetric": 1}, "symmetric must be one of True, False, got 1"),
        ({"head": "none"}, "head must be one of int8, int4, int4-plain, got 'none'"),
        ({"mode": "slow"}, "mode must be one of fast, precise, checkpoint, got 'slow'"),
        ({"ignore": "lm_head"}, "ignore must be a list of names, got 'lm_head'"),
        ({"ignore": [""]}, "ignore must be a list of names"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization-config.*{message}"):
        QuantizationConfig("int4", given)


def test_keys_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="symmetric has no effect with int8"):
        QuantizationConfig("int8", {"group_size": 32, "symmetric": True}).check("cpu")
    with pytest.raises(ConfigError, match="symmetric has no effect with int4"):
        QuantizationConfig("int4", {"symmetric": False}).check("cpu")
    with pytest.raises(ConfigError, match="mode has no effect with no --quantization"):
        QuantizationConfig(None, {"mode": "fast"}).check("cpu")
    QuantizationConfig(None, {"mode": "fast"}).check("cpu", encoded=True)
    QuantizationConfig().check("cpu")


def test_only_quantized_checkpoints_define_activation_rounding() -> None:
    QuantizationConfig(None, {"mode": "checkpoint"}).check("cpu", encoded=True)
    with pytest.raises(ConfigError, match=r"mode checkpoint .* has no effect with --quantization"):
        QuantizationConfig("int8", {"mode": "checkpoint"}).check("cpu", encoded=True)
    with pytest.raises(ConfigError, match=r"mode checkpoint .* has no effect with a checkpoint in floats"):
        QuantizationConfig("int4", {"mode": "checkpoint"}).check("cpu")


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-plain", "fp8"])
def test_a_head_of_its_own_kind(quantization: str) -> None:
    assert QuantizationConfig(quantization).head == "int8"
    config = QuantizationConfig(quantization, {"head": "int4-plain", "group_size": 64, "symmetric": False})
    config.check("cuda")
    assert (config.head, config.group_size("int4", "cuda"), config.symmetric) == ("int4-plain", 64, False)


def test_a_head_alone_may_be_rounded() -> None:
    assert not QuantizationConfig().rounds_head
    config = QuantizationConfig(None, {"head": "int8", "mode": "precise"})
    config.check("cpu")
    assert config.rounds_head
    with pytest.raises(ConfigError, match="ignore has no effect with no --quantization"):
        QuantizationConfig(None, {"head": "int8", "group_size": 32, "ignore": ["lm_head"]}).check("cpu")


@pytest.mark.parametrize(
    ("quantization", "given"),
    [("int4", {}), ("int8", {"head": "int4"}), (None, {"head": "int4"}), ("int4", {"head": "int8"})],
)
def test_int4_has_no_scale_per_output(quantization: str | None, given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="group_size 0, a scale per output, is for int8; int4 takes 32, 64 or 128"
    ):
        QuantizationConfig(quantization, {**given, "group_size": 0}).check("cpu")
    QuantizationConfig("int8", {"group_size": 0}).check("cpu")


def test_fp8_is_for_gpus() -> None:
    config = QuantizationConfig("fp8", {"scale": "tensor", "gemm": "triton"})
    config.check("cuda")
    assert (config.per_tensor, config.vendor) == (True, False)
    assert (QuantizationConfig("fp8").per_tensor, QuantizationConfig("fp8").vendor) == (False, True)
    with pytest.raises(
        ConfigError,
        match="fp8 needs a GPU that multiplies fp8; on a CPU there are int8 and int4 and int4-plain",
    ):
        config.check("cpu")


def test_the_mode_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="mode has no effect with int4 on cuda"):
        QuantizationConfig("int4", {"mode": "fast", "group_size": 64}).check("cuda")
