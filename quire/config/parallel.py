"""Where workers run."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class ParallelConfig(Config):
    """The executor."""

    distributed_executor_backend: str = option(
        "uni",
        "uni: the worker runs in the engine's process; null: nothing is computed; or a plug-in's.",
        choices=("uni", "null"),
        plugins="quire.executors",
    )
