# SPDX-License-Identifier: Apache-2.0
"""Interface of features that take part in the engine core's loop: holds on requests, and work beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.engine.messages import EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.features import CORE_FEATURES
from quire.plugins import import_place
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.scheduler import Scheduler


class CoreFeature:
    """One feature of one core; every method here does nothing.

    The executor has its KV cache when a feature is constructed. Times are of `clock`.
    """

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._clock = clock

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        """Return whether a core with this config needs the feature."""
        return True

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Utility calls by name (see `EngineCore.utilities`)."""
        return {}

    @property
    def has_work(self) -> bool:
        """True if `advance` has something to do now."""
        return False

    @property
    def patience_s(self) -> float | None:
        """Polling interval of an otherwise idle core, in seconds; None: it need not poll."""
        return None

    def holds_for(self, message: EngineCoreRequest) -> list[Hold]:
        """Return the holds of a new request.

        Raises:
            ClientError: the request is refused.
        """
        return []

    def admitted(self, request_id: str) -> None:
        """Note a request that the scheduler has accepted."""
        return None

    def advance(self) -> list[RequestUpdate]:
        """Do what is due before a step; returns the ends of requests that cannot run."""
        return []

    def stepped(self, updates: list[RequestUpdate]) -> None:
        """Note a finished step; may complete its updates."""
        return None

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the feature's state to the statistics of a step."""
        return None

    def settle(self, run_step: Callable[[], object]) -> None:
        """End all work on the KV cache, which is about to be cleared or freed; a step may be run for that."""
        return None

    def check_new_weights(self) -> None:
        """Check that the weights can be replaced now, while the scheduler is paused.

        Raises:
            ConflictError: the feature holds something of the old ones that a request needs.
        """
        return None

    def close(self) -> None:
        """Release what the feature itself has opened."""
        return None


def core_features(
    config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock
) -> list[CoreFeature]:
    """Return the features that a config needs, in the order of `CORE_FEATURES`."""
    classes: list[type[CoreFeature]] = [import_place(place) for place in CORE_FEATURES.values()]
    return [kind(config, executor, scheduler, clock) for kind in classes if kind.is_wanted(config)]
