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


def num_sharing(config: EngineConfig, num_ranks: int) -> int:
    """How many of so many ranks of a host take of the same memory; devices have memory of their own."""
    return num_ranks if config.device.device == "cpu" else 1


def memory_of_ranks(found: Sequence[KVMemory], num_beside: Sequence[int]) -> KVMemory:
    """What each of all ranks may take for the cache, of what each has found free where so many take of it."""
    parts = [_part(memory, num) for memory, num in zip(found, num_beside, strict=True)]
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
