"""`EngineArgs`: the flat spelling of `EngineConfig`, for callers who know vLLM's."""

from __future__ import annotations

from typing import Any

from quire.config.engine import EngineConfig


class EngineArgs:
    """Configuration by flat names, checked at once.

    Raises:
        TypeError: a name is no engine option.
        ConfigError: a value is out of range.
    """

    def __init__(self, model: str | None = None, **args: Any) -> None:
        self._config = EngineConfig.from_args(model=model, **args)

    def create_engine_config(self) -> EngineConfig:
        """The configuration these arguments stand for."""
        return self._config
