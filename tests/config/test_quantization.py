"""`QuantizationConfig`: what it means, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import QuantizationConfig
from quire.errors import ConfigError


def test_defaults() -> None:
    config = QuantizationConfig(quantization="int4")
    assert (config.group_size, config.symmetric, config.fast, config.ignore) == (32, True, True, ())


def test_every_key_is_read() -> None:
    given = {"group_size": 128, "symmetric": False, "mode": "precise", "ignore": ["lm_head"]}
    config = QuantizationConfig("int4", given)
    assert (config.group_size, config.symmetric, config.fast, config.ignore) == (
        128,
        False,
        False,
        ("lm_head",),
    )
    config.check("cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"groupsize": 32},
            "unknown key 'groupsize'; known are group_size, symmetric, mode, scale, gemm, head, ignore",
        ),
        ({"group_size": 48}, "group_size must be one of 32, 64, 128, got 48"),
        ({"symmetric": 1}, "symmetric must be one of True, False, got 1"),
        ({"head": "none"}, "head must be one of int8, int4, got 'none'"),
        ({"mode": "slow"}, "mode must be one of fast, precise, checkpoint, got 'slow'"),
        ({"ignore": "lm_head"}, "ignore must be a list of names, got 'lm_head'"),
        ({"ignore": [""]}, "ignore must be a list of names"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization-config.*{message}"):
        QuantizationConfig("int4", given)


def test_keys_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="group_size, symmetric means nothing with int8"):
        QuantizationConfig("int8", {"group_size": 32, "symmetric": True}).check("cpu")
    with pytest.raises(ConfigError, match="mode means nothing with no --quantization"):
        QuantizationConfig(None, {"mode": "fast"}).check("cpu")
    QuantizationConfig(None, {"mode": "fast"}).check("cpu", encoded=True)
    QuantizationConfig().check("cpu")


def test_only_quantised_checkpoints_say_how_activations_are_rounded() -> None:
    QuantizationConfig(None, {"mode": "checkpoint"}).check("cpu", encoded=True)
    with pytest.raises(ConfigError, match=r"mode checkpoint .* means nothing with --quantization"):
        QuantizationConfig("int8", {"mode": "checkpoint"}).check("cpu", encoded=True)
    with pytest.raises(ConfigError, match=r"mode checkpoint .* means nothing with a checkpoint in floats"):
        QuantizationConfig("int4", {"mode": "checkpoint"}).check("cpu")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_head_of_its_own_kind(quantization: str) -> None:
    assert QuantizationConfig(quantization).head == "int8"
    config = QuantizationConfig(quantization, {"head": "int4", "group_size": 64, "symmetric": False})
    config.check("cuda")
    assert (config.head, config.group_size, config.symmetric) == ("int4", 64, False)


def test_a_head_alone_may_be_rounded() -> None:
    assert not QuantizationConfig().rounds_head
    config = QuantizationConfig(None, {"head": "int8", "mode": "precise"})
    config.check("cpu")
    assert config.rounds_head
    with pytest.raises(ConfigError, match="group_size, ignore means nothing with no --quantization"):
        QuantizationConfig(None, {"head": "int8", "group_size": 32, "ignore": ["lm_head"]}).check("cpu")


def test_fp8_is_for_gpus() -> None:
    config = QuantizationConfig("fp8", {"scale": "tensor", "gemm": "triton"})
    config.check("cuda")
    assert (config.per_tensor, config.vendor) == (True, False)
    assert (QuantizationConfig("fp8").per_tensor, QuantizationConfig("fp8").vendor) == (False, True)
    with pytest.raises(
        ConfigError, match="fp8 needs a GPU that multiplies fp8; on a CPU there are int8 and int4"
    ):
        config.check("cpu")


def test_the_mode_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="mode means nothing with int4 on cuda"):
        QuantizationConfig("int4", {"mode": "fast", "group_size": 64}).check("cuda")
