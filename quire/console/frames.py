# SPDX-License-Identifier: Apache-2.0
"""Frames: what the console shows of one engine core at one moment, bounded in size whatever the core has.

Arrays of numbers are base64 of little-endian bytes, which a browser reads without parsing. Prompts and answers are in
no frame.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from quire.kv_cache.block_pool import BlockPool, KVCacheBlock
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import NULL_BLOCK_ID
from quire.scheduler.explain import WaitShare
from quire.scheduler.feature_stats import StoreStats
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput, SchedulerStats
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan

HELD, SHARED, CACHED = 1, 2, 4  # Bits of a block's state; one that is shared is not marked as held.
DEVICE, HOST = "device", "host"


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One finished step. Times are monotonic seconds of the core; prefill tokens are those of requests that compute
    several: of a prompt, or again after a preemption.
    """

    step_id: int
    planned_s: float
    ended_s: float
    num_requests: int
    num_prefill_tokens: int
    num_sampled_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_swapped_out: int
    num_swapped_in: int
    num_copied: int
    forward_s: float
    sample_s: float


def step_row(step: StepPlan, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> StepRow:
    """Return the row of a step whose result has arrived at `now`."""
    sizes = [end - start for _, start, end, _ in step.chunks]
    samples = [num_samples for _, _, _, num_samples in step.chunks]
    num_drafts = sum(samples) - len(samples) + samples.count(0)
    return StepRow(
        step.step_id,
        step.planned_ts,
        now,
        len(sizes),
        sum(sizes) - sizes.count(1),
        sum(map(len, output.sampled_token_ids.values())),
        num_drafts,
        sum(map(output.num_accepted, output.sampled_token_ids)) if num_drafts else 0,
        len(plan.swap_outs),
        len(plan.swap_ins),
        len(plan.block_copies),
        output.forward_s,
        output.sample_s,
    )


class RequestRow(msgspec.Struct, frozen=True):
    """State of one unfinished request.

    `shares` are what it has waited for, the longest first, and `cause` is what it waits for now. `device_blocks` and
    `host_blocks` are the ids of its blocks as uint32; null in frames that leave them out.
    """

    request_id: str
    tenant: str
    status: str
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    cause: str | None
    shares: list[WaitShare]
    device_blocks: str | None
    host_blocks: str | None


def request_row(request: Request, now: float, blocks: tuple[str, str] | None) -> RequestRow:
    """Return the row of a request whose blocks are encoded already."""
    device, host = blocks or (None, None)
    return RequestRow(
        request.request_id,
        request.tenant,
        request.status.name.lower(),
        max(now - request.queued_ts, 0.0),
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.num_computed_tokens,
        request.num_cached_tokens,
        request.num_preemptions,
        request.wait.cause.name.lower() if request.wait.cause else None,
        request.wait.shares(now),
        device,
        host,
    )


class BlockStates(msgspec.Struct, frozen=True):
    """States of consecutive blocks of one tier: a byte each, of the bits HELD (1), SHARED (2) and CACHED (4).

    Block 0 is the null block, which is never used.
    """

    num_blocks: int
    num_free: int
    first: int
    states: str


def block_states(pool: BlockPool, first: int, limit: int) -> BlockStates:
    """Return the states of up to `limit` blocks from `first` on."""
    states = bytes([state_of(block) for block in pool.blocks[first : first + limit]])
    return BlockStates(len(pool.blocks), pool.num_free_blocks, first, base64.b64encode(states).decode())


def state_of(block: KVCacheBlock) -> int:
    """Return the bits of a block's state."""
    held = block.ref_cnt and (HELD if block.ref_cnt == 1 else SHARED)
    return held if block.block_hash is None else held | CACHED


class Holder(msgspec.Struct, frozen=True):
    """Request that holds a block, at a position of its table in a KV cache group."""

    request_id: str
    group: int
    position: int


class BlockRow(msgspec.Struct, frozen=True):
    """State of one block: its holders, and the start of the hash under which it can be found.

    `num_holders` also counts planned moves and transfers. `is_pinned`: a planned move reads it; `is_borrowed`: a
    transfer with a store has it.
    """

    tier: str
    block_id: int
    num_holders: int
    is_full: bool
    is_pinned: bool
    is_borrowed: bool
    content: str | None
    holders: list[Holder]


def block_row(kv: KVCacheManager, tier: str, block_id: int, limit: int) -> BlockRow | None:
    """Return the state of one block, with up to `limit` holders; None if the tier has no such block."""
    pool = kv.pool if tier == DEVICE else kv.pool.host.pool
    if not NULL_BLOCK_ID < block_id < len(pool.blocks):
        return None
    block = pool.blocks[block_id]
    holders = [one for one, _ in zip(_holders(kv, block), range(limit), strict=False)]
    return BlockRow(
        tier,
        block_id,
        block.ref_cnt,
        block.is_full,
        block in pool.pinned,
        block_id in pool.borrowed,
        None if block.block_hash is None else block.block_hash.hex()[:16],
        holders,
    )


def _holders(kv: KVCacheManager, block: KVCacheBlock) -> Iterator[Holder]:
    for group, tables in enumerate(_tables(kv, on_host=block.on_host)):
        for request_id, table in tables:
            if block in table:  # compared by identity
                yield Holder(request_id, group, table.index(block))


def _tables(kv: KVCacheManager, *, on_host: bool) -> Iterator[Iterable[tuple[str, Sequence[KVCacheBlock]]]]:
    """Yield the tables of each group: (request id, blocks)."""
    swapped = kv.pool.host.swapped
    for group, manager in enumerate(kv.managers):
        if on_host:
            yield [(name, request.tables[group]) for name, request in swapped.items()]
        else:
            yield manager.tables.items()


def encode_ids(tables: Iterable[Sequence[KVCacheBlock]]) -> str:
    """Return the block ids of a request's tables as base64 of uint32, without the null block."""
    ids = array("I", [block.block_id for table in tables for block in table if block.block_id])
    if sys.byteorder == "big":
        ids.byteswap()
    return base64.b64encode(ids.tobytes()).decode()


def counts_of(stats: SchedulerStats) -> dict[str, float]:
    """Return the scheduler's numbers by name."""
    every = msgspec.structs.asdict(stats)
    return {name: value for name, value in every.items() if isinstance(value, int | float)}


class StoreState(msgspec.Struct, frozen=True):
    """KV store of a core as of its last step: blocks and bytes in it, and blocks moved since the start.

    `max_blocks`: room of a directory; 0: unknown. `is_resting`: it did not work, and is left alone for a while.
    """

    medium: str
    num_blocks: int
    max_blocks: int
    num_bytes: int
    num_loaded: int
    num_saved: int
    is_resting: bool


def store_state(stats: StoreStats, max_blocks: int) -> StoreState:
    """Return the state of a store with room for so many blocks."""
    return StoreState(
        stats.medium,
        stats.num_rows,
        max_blocks,
        stats.num_bytes,
        stats.num_loaded,
        stats.num_saved,
        stats.is_resting,
    )


class Frame(msgspec.Struct, frozen=True):
    """State of one core at `now` (monotonic seconds of the core).

    `stats` are the scheduler's counts (see `SchedulerStats`). `requests` are the first of `num_requests` in order of
    service; their number is bounded, as are the blocks of `device` and `host`. Large caches come in parts, one after
    the other. `steps` finished after the step that the query names. `next_s`: seconds until there is a newer frame.
    `store`: None without a KV store, and before the first step.
    """

    number: int
    now: float
    next_s: float
    block_size: int
    num_requests: int
    stats: dict[str, float]
    requests: list[RequestRow]
    device: BlockStates
    host: BlockStates
    steps: list[StepRow]
    store: StoreState | None = None
