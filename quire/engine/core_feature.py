# SPDX-License-Identifier: Apache-2.0
"""Interface of features that take part in the engine core's loop: holds on requests, and work beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from quire.config import EngineConfig
from quire.engine.core_progress import ProgressFile
from quire.engine.messages import CacheDelta, EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.features import CORE_FEATURES
from quire.kv_cache.events import KVCacheEvent
from quire.plugins import import_place
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.scheduler import Scheduler


class CoreAccess(Protocol):
    """Engine core as its features reach it."""

    progress: ProgressFile | None
    """Progress of the core's process, if it is recorded."""

    def settle(self) -> None:
        """Let features end their work on the KV cache."""

    def run_step(self) -> None:
        """Run a step; its updates are queued for the next output."""

    def check_files(self) -> None:
        """Raise StartupError if the model's files are no longer those of the start, or of the last update."""

    def check_new_weights(self) -> None:
        """Raise ConflictError if a feature holds something of the old weights that a request needs."""

    def has_weights_of(self, model_dir: str) -> bool:
        """Return whether the weights in use are those of a directory."""

    def use_weights_of(self, model_dir: str) -> None:
        """Note that the weights of a directory are in use."""


class CoreFeature:
    """One feature of one core; every method here does nothing.

    The executor has its KV cache when a feature is constructed. Times are of `clock`.
    """

    vital: ClassVar[frozenset[str]] = frozenset()
    """Utilities that leave scheduler and worker inconsistent if they fail midway."""
    reads_kv_events: ClassVar[bool] = False
    """True if the core calls `note_kv_events` and `pop_cache_delta`."""
    others: Sequence[CoreFeature] = ()
    """Other features of the core, in the order in which they are asked."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._clock = clock

    def connect(self, core: CoreAccess) -> None:
        """Store access to the core, which is complete now."""
        self._core = core

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

    def note_kv_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Record events of the KV cache in the order in which they happened."""
        return None

    def pop_cache_delta(self) -> CacheDelta | None:
        """Return changes of the prefix cache to send with a step's updates."""
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

    def use_new_weights(self) -> None:
        """Note that the worker computes with other weights from now on; the caches are empty."""
        return None

    def close(self) -> None:
        """Release what the feature itself has opened."""
        return None


def users_of(hook: str, features: Iterable[CoreFeature]) -> tuple[CoreFeature, ...]:
    """Return the features that define a method or property of `CoreFeature` of their own.

    Hooks of each step are called for these only.
    """
    empty = getattr(CoreFeature, hook)
    return tuple(feature for feature in features if getattr(type(feature), hook) is not empty)


def core_features(
    config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock
) -> list[CoreFeature]:
    """Return the features that a config needs, in the order of `CORE_FEATURES`."""
    classes: list[type[CoreFeature]] = [import_place(place) for place in CORE_FEATURES.values()]
    features = [kind(config, executor, scheduler, clock) for kind in classes if kind.is_wanted(config)]
    for feature in features:
        feature.others = tuple(one for one in features if one is not feature)
    return features
