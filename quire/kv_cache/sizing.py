# SPDX-License-Identifier: Apache-2.0
"""Sizing of the KV cache: number of blocks and longest request.

Invariant: pure arithmetic on measured values. Every choice or refusal is logged with its numbers.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping

from quire.config import EngineConfig
from quire.config.kv_store import BUFFER_BYTES
from quire.config.pooling import TOKEN_TASKS
from quire.errors import ConfigError
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import (
    Groups,
    KVCacheConfig,
    KVCacheSpec,
    KVMemory,
    fit_states,
    of_layers,
    tensor_block_bytes,
)

logger = logging.getLogger(__name__)

MIB = 2**20
NULL_BLOCK = 1
MIN_BUFFER_BLOCKS = 64
MIN_MODEL_LEN = 2  # One prompt token and one output token.


def size_kv_cache(config: EngineConfig, specs: Mapping[str, KVCacheSpec], memory: KVMemory) -> KVCacheConfig:
    """Group the layers and choose the number of blocks.

    The number is as configured, or the least of free memory, useful memory and the device's default limit; on the host,
    what --swap-space holds and --kv-store needs. With pipeline stages the one with the largest block decides. Without
    any cache there is the null block alone.

    Raises:
        ConfigError: the layers cannot share a cache.
    """
    hybrid = not config.cache.disable_hybrid_kv_cache_manager
    specs = fit_states(specs)
    groups = group_layers(specs, config.model.max_model_len, hybrid=hybrid)
    if not any(spec.block_bytes for spec in specs.values()):
        logger.info("KV cache: none, an encoder caches nothing")
        return KVCacheConfig(NULL_BLOCK, groups, specs, swap_costs=memory.swap_costs)
    block_size = groups[0].spec.block_size
    if block_size != config.cache.block_size:
        logger.info("KV block size = %d tokens, so that a block holds a recurrent state", block_size)
    block_bytes = max(
        sum(tensor_block_bytes(of_layers(groups, names), specs)) for names in memory.stages or (specs,)
    )
    num_blocks, reason = _choose_num_blocks(config, groups, block_bytes, memory)
    logger.info("KV cache memory = %.1f MiB: %s", num_blocks * block_bytes / MIB, reason)
    num_host_blocks = max(
        config.cache.swap_space_bytes // block_bytes, _buffer_blocks(config, groups, block_bytes)
    )
    if num_host_blocks:
        logger.info("host tier: %d blocks, %.1f MiB", num_host_blocks, num_host_blocks * block_bytes / MIB)
    return KVCacheConfig(num_blocks, groups, specs, num_host_blocks, memory.swap_costs)


def _buffer_blocks(config: EngineConfig, groups: Groups, block_bytes: int) -> int:
    """Return the host blocks that transfers to other places go through: twice the longest prefix, in bounds."""
    if not config.kv_store.moves_rows:
        return 0
    longest = blocks_per_request(groups, config.model.max_model_len, config.scheduler.max_num_batched_tokens)
    return max(min(2 * longest, BUFFER_BYTES // block_bytes), MIN_BUFFER_BLOCKS)


def resolve_max_model_len(config: EngineConfig, kv_config: KVCacheConfig) -> EngineConfig:
    """Lower `max_model_len` to what the cache can hold if it is "auto", else check it; log the capacity.

    Raises:
        ConfigError: not even one request of `max_model_len` tokens fits.
    """
    asked, chunk = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    usable, groups = kv_config.num_blocks - NULL_BLOCK, kv_config.groups
    longest = largest_model_len(groups, usable, chunk, asked)
    if config.fit_max_model_len and MIN_MODEL_LEN <= longest < asked:
        logger.info(
            "max_model_len = %d: the most that the KV cache can hold; the model allows %d", longest, asked
        )
        config = config.evolve(max_model_len=longest)
    elif longest < asked:
        raise ConfigError(_too_small(kv_config, blocks_per_request(groups, asked, chunk), asked, longest))
    _log_capacity(config, kv_config)
    return config


def blocks_per_request(groups: Groups, num_tokens: int, max_chunk: int) -> int:
    """Return the most blocks over all groups that a request of `num_tokens` tokens holds."""
    return sum(group.spec.max_blocks(num_tokens, max_chunk) for group in groups)


def largest_model_len(groups: Groups, num_usable_blocks: int, max_chunk: int, limit: int) -> int:
    """Return the tokens of the longest request, `limit` at most, that `num_usable_blocks` blocks can hold."""
    lengths = range(limit + 1)
    fitting = bisect.bisect_right(
        lengths, num_usable_blocks, key=lambda n: blocks_per_request(groups, n, max_chunk)
    )
    return max(fitting - 1, 0)


def _choose_num_blocks(
    config: EngineConfig, groups: Groups, block_bytes: int, memory: KVMemory
) -> tuple[int, str]:
    cache = config.cache
    if cache.num_gpu_blocks_override:
        return cache.num_gpu_blocks_override, "as --num-gpu-blocks-override says"
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes // block_bytes, "as --kv-cache-memory-bytes says"
    max_model_len, max_num_seqs = config.model.max_model_len, config.scheduler.max_num_seqs
    per_request = blocks_per_request(groups, max_model_len, config.scheduler.max_num_batched_tokens)
    pooled_bytes = _pooled_bytes_of_block(config, per_request)
    if pooled_bytes:
        logger.info("%d bytes per block are reserved for pooled output of its tokens", pooled_bytes)
        block_bytes += pooled_bytes
    bounds = [
        (memory.free_bytes // block_bytes, memory.reason),
        (
            max_num_seqs * per_request + NULL_BLOCK,
            f"all that {max_num_seqs} requests of {max_model_len} tokens can use",
        ),
    ]
    if memory.default_bytes is not None:
        reason = "half of the free memory, or one full request if that is more (--gpu-memory-utilization)"
        bounds.append((max(memory.default_bytes // block_bytes, per_request + NULL_BLOCK), reason))
    return min(bounds)


def _pooled_bytes_of_block(config: EngineConfig, per_request: int) -> int:
    """Return the host bytes per block for token-wise pooled output kept until the text ends, if the cache is on the
    host.

    Each chunk of a text adds float32 values per token. The longest text, of `per_request` blocks, has the most values
    per block.
    """
    spec = config.pooling
    if spec is None or config.device.device != "cpu" or not config.scheduler.enable_chunked_prefill:
        return 0
    largest = max((spec.size_of(task) for task in spec.tasks if task in TOKEN_TASKS), default=0)
    return -(-4 * largest * config.model.max_model_len // per_request)


def _log_capacity(config: EngineConfig, kv_config: KVCacheConfig) -> None:
    if not kv_config.bytes:
        return
    max_model_len, chunk = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    usable = kv_config.num_blocks - NULL_BLOCK
    requests = usable / blocks_per_request(kv_config.groups, max_model_len, chunk)
    # Tokens that full-length requests can cache together; all blocks if there is one group.
    tokens = int(requests * kv_config.groups[0].spec.num_blocks(max_model_len)) * kv_config.block_size
    logger.info(
        "KV cache: %d blocks, %.1f MiB, %d tokens: %.1f requests of %d tokens at once",
        kv_config.num_blocks,
        kv_config.bytes / MIB,
        tokens,
        requests,
        max_model_len,
    )


def _too_small(kv_config: KVCacheConfig, needed: int, asked: int, longest: int) -> str:
    block_bytes = sum(kv_config.tensor_block_bytes)
    usable = max(kv_config.num_blocks - NULL_BLOCK, 0)
    fits = f"--max-model-len {longest} would fit, " if longest >= MIN_MODEL_LEN else ""
    return (
        f"one request of --max-model-len {asked} needs {needed} KV cache blocks ({needed * block_bytes / MIB:.1f} MiB)"
        f", but there is memory for {usable} ({usable * block_bytes / MIB:.1f} MiB): {fits}--max-model-len auto takes "
        "the most that fits, and --kv-cache-memory-bytes or --gpu-memory-utilization give the cache more"
    )
