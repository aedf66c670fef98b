"""What requests may ask their text to be (see structured_output.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError
from quire.structured_output.backends import check_backend
from quire.structured_output.settings import StructuredOutputsSettings


@dataclass(frozen=True)
class StructuredOutputsConfig(Config):
    """Constraints on what is generated: JSON schemas, expressions, grammars (see structured_output.md)."""

    structured_outputs_config: dict[str, Any] = option(
        {}, 'JSON object such as {"disable_any_whitespace": true}; all keys are in structured_output.md.'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _parse(self.structured_outputs_config)

    @property
    def settings(self) -> StructuredOutputsSettings:
        """The keys with their types and defaults."""
        return _parse(self.structured_outputs_config)

    def check(self) -> None:
        """Refuse a backend that cannot be had, without importing one.

        Raises:
            ConfigError: as of `check_backend`.
        """
        check_backend(self.settings.backend)


def _parse(value: dict[str, Any]) -> StructuredOutputsSettings:
    try:
        return msgspec.convert(value, StructuredOutputsSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--structured-outputs-config: {error}") from None
