# SPDX-License-Identifier: Apache-2.0
"""Interface of features that take part in `prepare`: automatic values, checks, and further models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config import EngineConfig
from quire.features import START_FEATURES
from quire.plugins import import_place

Usage = Literal["server", "offline", "headless"]
"""Use of this process: a server, a program with an engine, or ranks for the engine of another host."""


@dataclass(frozen=True)
class AutomaticValue:
    """One automatic choice."""

    field: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolution:
    """Values that a feature resolves.

    Attributes:
        changes: new values of fields of `EngineConfig` itself.
        choices: automatic choices, logged with their reasons.
        max_seq_length: longest input that the checkpoint's files name.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    choices: Iterable[AutomaticValue] = ()
    max_seq_length: int | None = None


class StartFeature:
    """Feature that takes part in `prepare`; every method here does nothing."""

    def resolve(self, config: EngineConfig, id_of: Callable[[str], int | None]) -> Resolution:
        """Resolve the feature's automatic values; the model and its architecture are known.

        Args:
            id_of: returns the id of a token by its name in the vocabulary.

        Raises:
            StartupError: an option does not suit the model.
        """
        return Resolution()

    def check(self, config: EngineConfig) -> None:
        """Check a config whose automatic values are resolved.

        Raises:
            StartupError: an option is not possible.
        """
        return None

    def complete(self, config: EngineConfig, usage: Usage) -> EngineConfig:
        """Return the checked config with what the feature adds to it, such as another model's config.

        Raises:
            StartupError: that cannot be found or read.
        """
        return config


def start_features() -> list[StartFeature]:
    """Return all features of `START_FEATURES`, in their order."""
    return [import_place(place)() for place in START_FEATURES.values()]
