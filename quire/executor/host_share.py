"""What each of several ranks takes of its host, whose processors and memory all of them there see as their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config import EngineConfig
from quire.kv_cache.spec import KVMemory
from quire.platforms import Host


def config_of_rank(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """The configuration of each of so many ranks of a host, which has an equal part of the processors."""
    if num_ranks == 1 or config.device.cpu_threads:
        return config
    return config.evolve(cpu_threads=max(Host().num_threads()[0] // num_ranks, 1))


def memory_of_ranks(found: Sequence[KVMemory], num_ranks: int) -> KVMemory:
    """What each of all ranks may take for the cache, of what each has found free on a host of so many ranks."""
    least = min(found, key=lambda memory: memory.free_bytes)
    if num_ranks == 1:
        return least
    unasked = [memory.default_bytes for memory in found if memory.default_bytes is not None]
    return replace(
        least,
        free_bytes=least.free_bytes // num_ranks,
        default_bytes=min(unasked) // num_ranks if unasked else None,
        reason=f"a part for each of {num_ranks} ranks of {least.reason}",
    )
