# SPDX-License-Identifier: Apache-2.0
"""Partition of a host's processors and memory among its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config import EngineConfig
from quire.kv_cache.spec import KVMemory
from quire.platforms import Host


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
