# SPDX-License-Identifier: Apache-2.0
"""Partition of a host's processors and memory among its ranks, and placement on them and so on their NUMA nodes.

Invariant: affinity is set before the rank's program starts, so no thread of it ever ran elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from quire.config import EngineConfig
from quire.kv_cache.spec import KVMemory
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


def rank_config(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """Return the configuration of each of a host's ranks, with an equal part of the processors."""
    if num_ranks == 1 or config.device.cpu_threads:
        return config
    return config.evolve(cpu_threads=max(Host().num_threads()[0] // num_ranks, 1))


def num_ranks_sharing_memory(config: EngineConfig, num_ranks: int) -> int:
    """Return how many of a host's ranks share memory; devices have their own."""
    return num_ranks if config.device.device == "cpu" else 1


def memory_per_rank(found: Sequence[KVMemory], num_sharing_memory: Sequence[int]) -> KVMemory:
    """Return the memory per rank for the cache, given each rank's free memory and the number of ranks that share it."""
    parts = [_part(memory, num) for memory, num in zip(found, num_sharing_memory, strict=True)]
    unasked = [memory.default_bytes for memory in parts if memory.default_bytes is not None]
    least = min(parts, key=lambda memory: memory.free_bytes)
    return replace(least, default_bytes=min(unasked) if unasked else None)


def _part(memory: KVMemory, num_ranks: int) -> KVMemory:
    if num_ranks == 1:
        return memory
    default = memory.default_bytes
    return replace(
        memory,
        free_bytes=memory.free_bytes // num_ranks,
        default_bytes=None if default is None else default // num_ranks,
        reason=f"a part for each of {num_ranks} ranks of {memory.reason}",
    )
