"""How weights are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "group_size": (32, 64, 128),
    "symmetric": (True, False),
    "mode": ("fast", "precise"),
}
_INT4_ONLY = ("group_size", "symmetric")


@dataclass(frozen=True)
class QuantizationConfig(Config):
    """Precision in which the weights of linear layers and of the output head are kept."""

    quantization: str | None = option(
        None, "Quantise weights while loading; default: not at all.", choices=("int8", "int4")
    )
    quantization_config: dict[str, Any] = option(
        {},
        "JSON object with group_size and symmetric (int4), mode (fast, precise) and ignore (name prefixes).",
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

    def check(self) -> None:
        """Refuse keys that would do nothing.

        Raises:
            ConfigError: names them.
        """
        useless = set(self.quantization_config) - self._used_keys()
        if useless:
            scheme = self.quantization or "no --quantization"
            raise ConfigError(
                f"--quantization-config: {', '.join(sorted(useless))} means nothing with {scheme}"
            )

    def _used_keys(self) -> set[str]:
        used = {"mode", "ignore", *_INT4_ONLY} if self.quantization == "int4" else {"mode", "ignore"}
        return used if self.quantization else set()

    @property
    def group_size(self) -> int:
        """Values of k that share an int4 scale."""
        return int(self.quantization_config.get("group_size", 32))

    @property
    def symmetric(self) -> bool:
        """Whether int4 has no zero points."""
        return bool(self.quantization_config.get("symmetric", True))

    @property
    def fast(self) -> bool:
        """Whether activations are rounded to 8 bits so that integers can be multiplied."""
        return bool(self.quantization_config.get("mode", "fast") == "fast")

    @property
    def ignore(self) -> tuple[str, ...]:
        """Patterns of module names that are left alone: prefixes, in which * and ? are wildcards."""
        return tuple(self.quantization_config.get("ignore", ()))


def _check_ignore(value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"--quantization-config: ignore must be a list of names, got {value!r}")
