# SPDX-License-Identifier: Apache-2.0
"""Interface of a front end to the choice of a core for each request, found in `quire.features.CORE_ROUTER`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.config import EngineConfig
from quire.engine.messages import CacheDelta
from quire.engine.shared_counters import CounterSlot
from quire.features import CORE_ROUTER
from quire.kv_cache.hashing import ExtraKeys
from quire.plugins import import_place
from quire.scheduler.output import SchedulerStats


class CoreChoice:
    """Choice of a core for each request; this class takes the first one.

    Invariant: a request counts on one core from `route` to `finish`.
    """

    def __init__(self, config: EngineConfig, num_cores: int) -> None:
        """Accept the arguments of subclasses."""

    def share(self, slot: CounterSlot) -> None:
        """Share loads with the other front ends of the cores; call before there are requests."""
        return None

    def admit(
        self,
        name: str,
        token_ids: list[int],
        num_sequences: int,
        keys: ExtraKeys,
        first_id: str,
        cores: Sequence[int],
    ) -> int:
        """Return one of these cores for a new request.

        Args:
            token_ids: prompt.
            keys: what the prompt's blocks depend on besides.
            first_id: core id of its first sequence.
        """
        return cores[0]

    def move(self, name: str, cores: Sequence[int]) -> int:
        """Return another core for a request whose own is gone; its prompt is computed again."""
        return cores[0]

    def mark_updated(self, core_ids: Iterable[str]) -> None:
        """Record the first updates of these sequences."""
        return None

    def finish(self, name: str) -> None:
        """Remove a finished request."""
        return None

    def ready(self, core: int, num_blocks: int, block_size: int | None = None) -> None:
        """Record that a core has loaded, with `num_blocks` blocks of `block_size` tokens; None: as configured."""
        return None

    def lost(self, core: int) -> None:
        """Record the loss of a core and of its cache."""
        return None

    def observe(self, core: int, stats: SchedulerStats) -> None:
        """Record a core's statistics."""
        return None

    def cached(self, core: int, delta: CacheDelta) -> None:
        """Apply a core's prefix cache delta."""
        return None


def make_core_choice(config: EngineConfig, num_cores: int) -> CoreChoice:
    """Return the router in the table, or the choice of the first core."""
    kinds: list[type[CoreChoice]] = [import_place(place) for place in CORE_ROUTER.values()]
    return next(iter(kinds), CoreChoice)(config, num_cores)
