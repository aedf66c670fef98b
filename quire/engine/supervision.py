# SPDX-License-Identifier: Apache-2.0
"""Interface to the supervision of core processes, found in `quire.features.CORE_SUPERVISION`.

`Supervision` itself is an engine without it: no core is replaced, and no silence counts as a hang.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.engine.core_progress import ProgressFile
from quire.features import CORE_SUPERVISION
from quire.plugins import import_place

if TYPE_CHECKING:
    from quire.executor.base import Executor

STALL_S = 5.0  # A core without progress and computation for so long is not ready for requests.


@dataclass(frozen=True)
class Verdict:
    """Delay of the restart (None: the engine has died with the core), and the requests that are not resumed."""

    restart_in_s: float | None
    failed: frozenset[str] = frozenset()
    reason: str = field(default="", compare=False)
    """Reason why the core is not replaced."""


class CoreSupervisor(Protocol):
    """Judge of the deaths of an engine's cores; requests are named by their front end."""

    def died(
        self, core: int, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()
    ) -> Verdict:
        """Decide about a dead core, given its requests in flight and in work; others are `elsewhere`."""

    def left(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()) -> Verdict:
        """Decide about a core that its own host restarts: it may return at any time."""


class HangDetector(Protocol):
    """Detector of a hanging core, polled while the core is silent."""

    silent_s: float
    """Seconds without progress."""

    @property
    def stalls(self) -> bool:
        """True if the core seems not to be ready for requests."""

    def poll(self, progress: ProgressFile, pid: int) -> bool:
        """Poll a silent core's process and its progress; return whether the core hangs."""


class _NoReplacement:
    """Supervisor of cores that are not replaced."""

    def died(
        self, core: int, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()
    ) -> Verdict:
        return Verdict(None, reason="it is not replaced")

    def left(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()) -> Verdict:
        return Verdict(0.0, frozenset(in_flight))


class _NoDetector:
    """Hang detector that detects none."""

    silent_s = 0.0
    stalls = False

    def poll(self, progress: ProgressFile, pid: int) -> bool:
        return False


class Supervision:
    """Factories of supervision."""

    def make_supervisor(self, *, resume: bool) -> CoreSupervisor:
        """Return a supervisor; `resume`: whether requests in flight resume in a new core."""
        return _NoReplacement()

    def make_hang_detector(self, timeout_s: float) -> HangDetector:
        """Return a detector of hangs longer than `timeout_s`."""
        return _NoDetector()

    def observed(self, executor: Executor, progress: ProgressFile, *, is_alone: bool) -> Executor:
        """Return an executor that records plans in `progress` before they are executed.

        Args:
            is_alone: whether a step's duration depends on its own work only; false if other replicas take part.
        """
        return executor


def supervision() -> Supervision:
    """Return the supervision in the table, or none."""
    found: Supervision = next((import_place(place)() for place in CORE_SUPERVISION.values()), Supervision())
    return found
