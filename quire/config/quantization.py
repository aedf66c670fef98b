"""How weights are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError


@dataclass(frozen=True)
class MethodOptions:
    """What a method that quantises while loading can be told, and where it can be used."""

    keys: tuple[str, ...]
    """Of --quantization-config."""
    needs: str | None = None
    """What it needs that a CPU has not."""
    for_head: bool = True


DEFAULT_GROUP = 32

METHODS: Mapping[str, MethodOptions] = {
    "int8": MethodOptions(("mode", "group_size")),
    "int4": MethodOptions(("mode", "group_size")),
    "int4-plain": MethodOptions(("mode", "group_size", "symmetric")),
    "fp8": MethodOptions(("scale", "gemm"), needs="a GPU that multiplies fp8", for_head=False),
}
"""Methods by name. On a CPU int4 has scales and minimums in two levels; on a GPU it is int4-plain, symmetric."""

FOUR_BITS = ("int4", "int4-plain")
"""Methods whose codes have 4 bits."""

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
    """Precision in which the weights of linear layers and of the output head are kept."""

    quantization: str | None = option(
        None,
        "Quantise weights while loading; default: not at all. fp8 needs a GPU.",
        choices=tuple(METHODS),
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
        """Refuse what this type of device cannot do, and keys that would do nothing.

        `encoded` says that the checkpoint's weights are quantised already.

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
                f"--quantization-config: {', '.join(sorted(useless))} means nothing with {scheme} on {device}"
            )
        if self.follows_checkpoint and (not encoded or self.quantization is not None):
            instead = "--quantization" if encoded else "a checkpoint in floats"
            raise ConfigError(
                "--quantization-config: mode checkpoint rounds activations as a quantised checkpoint says, and "
                f"means nothing with {instead}"
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
        """Whether the output head is kept in fewer bits: with everything else, or alone if it is named."""
        return self.quantization is not None or "head" in self.quantization_config

    def group_size(self, kind: str, device: str) -> int:
        """Return how many values of k share a scale of int4 or int8; 0: all of an output.

        A GPU multiplies int8 with a scale per output unless it is asked for groups.
        """
        default = 0 if kind == "int8" and device != "cpu" else DEFAULT_GROUP
        return int(self.quantization_config.get("group_size", default))

    @property
    def symmetric(self) -> bool:
        """Whether int4-plain has no zero points."""
        return bool(self.quantization_config.get("symmetric", True))

    @property
    def fast(self) -> bool:
        """Whether activations are rounded to 8 bits so that integers can be multiplied."""
        return bool(self.quantization_config.get("mode", "fast") == "fast")

    @property
    def follows_checkpoint(self) -> bool:
        """Whether activations are rounded as a checkpoint says, and in no other way."""
        return bool(self.quantization_config.get("mode") == "checkpoint")

    @property
    def per_tensor(self) -> bool:
        """Whether an fp8 weight has one scale instead of one per output."""
        return bool(self.quantization_config.get("scale", "row") == "tensor")

    @property
    def vendor(self) -> bool:
        """Whether fp8 products are the vendor's library's where it takes them."""
        return bool(self.quantization_config.get("gemm", "vendor") == "vendor")

    @property
    def head(self) -> str:
        """How the output head, and with it a table that is looked up as well, is kept: coarser costs accuracy."""
        return str(self.quantization_config.get("head", "int8"))

    @property
    def ignore(self) -> tuple[str, ...]:
        """Patterns of module names that are left alone: prefixes, in which * and ? are wildcards."""
        return tuple(self.quantization_config.get("ignore", ()))


def _check_ignore(value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"--quantization-config: ignore must be a list of names, got {value!r}")
