"""Which processors each rank of a host keeps to, and so which memory it has, which the system gives beside them.

Invariant: a rank is on its processors before it is a program, so nothing of it was ever elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.config import EngineConfig
from quire.placement import divided, nodes_of, shown
from quire.platforms import Host

logger = logging.getLogger(__name__)

Processors = tuple[int, ...]


def places_of_ranks(
    config: EngineConfig, ranks: Sequence[int], host: Host | None = None
) -> dict[int, Processors]:
    """Those of each of the ranks that this host has, where they have cores apart; else nothing: they run anywhere."""
    host = host or Host()
    if not are_apart(config, len(ranks), host):
        return {}
    nodes, places = host.nodes(), {}
    for rank, cores in zip(ranks, divided(nodes, len(ranks)), strict=True):
        places[rank] = tuple(sorted(cpu for core in cores for cpu in core))
        numbers = ", ".join(map(str, nodes_of(cores, nodes)))
        logger.info("rank %d: processors %s of NUMA node %s", rank, shown(places[rank]), numbers)
    return places


def are_apart(config: EngineConfig, num_ranks: int, host: Host) -> bool:
    """Whether so many ranks of a host keep to cores of their own."""
    wanted = config.device.cpu_numa != "off" and config.device.device == "cpu"
    return wanted and 1 < num_ranks <= len(host.cores())


@contextmanager
def on(processors: Processors) -> Iterator[None]:
    """What this thread starts meanwhile keeps to them; none: to what this thread does."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
