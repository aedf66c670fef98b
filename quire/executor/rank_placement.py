# SPDX-License-Identifier: Apache-2.0
"""Placement of a host's ranks on processors, and so on the memory of their NUMA nodes.

Invariant: affinity is set before the rank's program starts, so no thread of it ever ran elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.config import EngineConfig
from quire.platforms import Host, divide_cores, format_processors, nodes_of

logger = logging.getLogger(__name__)

Processors = tuple[int, ...]


def rank_processors(
    config: EngineConfig, ranks: Sequence[int], host: Host | None = None
) -> dict[int, Processors]:
    """Return the processors of each of this host's ranks if they get cores of their own; else an empty dict."""
    host = host or Host()
    if not have_own_cores(config, len(ranks), host):
        return {}
    nodes, places = host.nodes(), {}
    for rank, cores in zip(ranks, divide_cores(nodes, len(ranks)), strict=True):
        places[rank] = tuple(sorted(cpu for core in cores for cpu in core))
        numbers = ", ".join(map(str, nodes_of(cores, nodes)))
        logger.info("rank %d: processors %s of NUMA node %s", rank, format_processors(places[rank]), numbers)
    return places


def have_own_cores(config: EngineConfig, num_ranks: int, host: Host) -> bool:
    """Return whether a host's ranks get cores of their own."""
    wanted = config.device.cpu_numa != "off" and config.device.device == "cpu"
    return wanted and 1 < num_ranks <= len(host.cores())


@contextmanager
def affinity(processors: Processors) -> Iterator[None]:
    """Set this thread's affinity, inherited by processes it starts; no effect for an empty set."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
