# SPDX-License-Identifier: Apache-2.0
"""Weight quantization at load time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError
from quire.vllm_names.option_values import CHECKPOINT_METHODS


@dataclass(frozen=True)
class MethodOptions:
    """Options and requirements of a load-time quantization method."""

    keys: tuple[str, ...]  # Keys of --quantization-config.
    needs: str | None = None  # Requirement that a CPU does not meet.
    for_head: bool = True


DEFAULT_GROUP = 32

METHODS: Mapping[str, MethodOptions] = {
    "int8": MethodOptions(("mode", "group_size")),
    "int4": MethodOptions(("mode", "group_size")),
    "int4-plain": MethodOptions(("mode", "group_size", "symmetric")),
    "fp8": MethodOptions(("scale", "gemm"), needs="a GPU that multiplies fp8", for_head=False),
}
"""Torch-free part of `quire.layers.quantization.METHODS`, by the same names.

On a CPU int4 has scales and minimums in two levels; on a GPU it is int4-plain, symmetric.
"""

FOUR_BITS = ("int4", "int4-plain")  # Methods with codes of 4 bits.

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "group_size": (0, 32, 64, 128),
    "symmetric": (True, False),
    "mode": ("fast", "precise", "checkpoint"),
    "scale": ("row", "tensor"),
    "gemm": ("vendor", "triton"),
    "head": tuple(name for name, method in METHODS.items() if method.for_head),
}


@dataclass(frozen=True)
class QuantizationConfig(Config):
    """Precision of the weights of linear layers and of the output head."""

    quantization: str | None = option(
        None,
        "Quantize weights while loading; default: not at all. fp8 needs a GPU. The format of a quantized checkpoint "
        "is only compared.",
        choices=(*METHODS, *CHECKPOINT_METHODS),
    )
    quantization_config: dict[str, Any] = option(
        {},
        "JSON: group_size, symmetric, mode (fast, precise, checkpoint), scale (row, tensor), gemm (vendor, triton), "
        "head (int8, int4), ignore.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in self.quantization_config.items():
            if key == "ignore":
                _check_ignore(value)
            elif key not in _CHOICES:
                known = ", ".join((*_CHOICES, "ignore"))
                raise ConfigError(f"--quantization-config has the unknown key {key!r}; known are {known}")
            elif not any(value == choice and type(value) is type(choice) for choice in _CHOICES[key]):
                choices = ", ".join(map(str, _CHOICES[key]))
                raise ConfigError(f"--quantization-config: {key} must be one of {choices}, got {value!r}")

    def check(self, device: str, *, encoded: bool = False) -> None:
        """Reject options that the device type does not support, and keys without effect.

        `encoded`: the checkpoint's weights are quantized already.

        Raises:
            ConfigError: names them.
        """
        method = METHODS.get(self.quantization or "")
        kinds = {self.quantization, self.head} if self.rounds_head else {self.quantization}
        if self.quantization_config.get("group_size") == 0 and not kinds.isdisjoint(FOUR_BITS):
            raise ConfigError(
                "--quantization-config: group_size 0, a scale per output, is for int8; int4 takes 32, 64 or 128"
            )
        if method is not None and method.needs is not None and device == "cpu":
            others = " and ".join(name for name, other in METHODS.items() if other.needs is None)
            raise ConfigError(
                f"--quantization {self.quantization} needs {method.needs}; on a CPU there are {others}"
            )
        useless = set(self.quantization_config) - self._used_keys(device, encoded)
        if useless:
            scheme = self.quantization or "no --quantization"
            raise ConfigError(
                f"--quantization-config: {', '.join(sorted(useless))} has no effect with {scheme} on {device}"
            )
        if self.follows_checkpoint and (not encoded or self.quantization is not None):
            instead = "--quantization" if encoded else "a checkpoint in floats"
            raise ConfigError(
                "--quantization-config: mode checkpoint quantizes activations as a quantized checkpoint states, and "
                f"has no effect with {instead}"
            )

    def _used_keys(self, device: str, encoded: bool) -> set[str]:
        cpu_only = {"mode"} if device != "cpu" else set()
        if self.quantization is not None:
            keys = {*METHODS[self.quantization].keys, *METHODS[self.head].keys, "head", "ignore"}
        else:
            keys = {*METHODS[self.head].keys, "head"} if self.rounds_head else set()
        return (keys | {"mode"} if encoded else keys) - cpu_only

    @property
    def rounds_head(self) -> bool:
        """True if the output head is quantized: with everything else, or alone if it is named."""
        return self.quantization is not None or "head" in self.quantization_config

    def group_size(self, kind: str, device: str) -> int:
        """Return how many values of k share a scale of int4 or int8; 0: all of an output.

        A GPU uses a scale per output for int8 unless groups are configured.
        """
        default = 0 if kind == "int8" and device != "cpu" else DEFAULT_GROUP
        return int(self.quantization_config.get("group_size", default))

    @property
    def symmetric(self) -> bool:
        """True if int4-plain has no zero points."""
        return bool(self.quantization_config.get("symmetric", True))

    @property
    def fast(self) -> bool:
        """True if activations are quantized to 8 bits for integer matmuls."""
        return bool(self.quantization_config.get("mode", "fast") == "fast")

    @property
    def follows_checkpoint(self) -> bool:
        """True if activations are quantized exactly as the checkpoint specifies."""
        return bool(self.quantization_config.get("mode") == "checkpoint")

    @property
    def per_tensor(self) -> bool:
        """True if an fp8 weight has one scale instead of one per output."""
        return bool(self.quantization_config.get("scale", "row") == "tensor")

    @property
    def vendor(self) -> bool:
        """True if fp8 matmuls use the vendor's library where possible."""
        return bool(self.quantization_config.get("gemm", "vendor") == "vendor")

    @property
    def head(self) -> str:
        """Precision of the output head, and of an embedding table tied to it; coarser ones cost accuracy."""
        return str(self.quantization_config.get("head", "int8"))

    @property
    def ignore(self) -> tuple[str, ...]:
        """Patterns of module names that are not quantized: prefixes, in which * and ? are wildcards."""
        return tuple(self.quantization_config.get("ignore", ()))


def _check_ignore(value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"--quantization-config: ignore must be a list of names, got {value!r}")
