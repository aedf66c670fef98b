"""What the null executor keeps in place of keys and values: in each slot, a fingerprint of all tokens up to it.

Invariant: a slot holds a fingerprint only if it was written, or copied with its block from one that was; ids out
of range and moves whose outcome would depend on their order raise AssertionError.
"""

from __future__ import annotations

from quire.kv_cache.block_pool import NULL_BLOCK_ID
from quire.scheduler.output import SchedulerOutput

Moves = list[tuple[int, int]]


def fingerprint(previous: int, token_id: int) -> int:
    """Fingerprint of a sequence plus one token: a step of Knuth's MMIX linear congruential generator."""
    return ((previous ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64


class FingerprintTier:
    """The blocks of one tier: block id -> offset -> fingerprint."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = range(NULL_BLOCK_ID + 1, num_blocks)
        self._blocks: dict[int, dict[int, int]] = {}

    def read(self, block_id: int, offset: int) -> int | None:
        """The fingerprint in a slot, None if there is none."""
        return self._blocks.get(block_id, {}).get(offset)

    def write(self, block_id: int, offset: int, value: int) -> None:
        self._blocks.setdefault(block_id, {})[offset] = value

    def check_ids(self, block_ids: list[int], who: str) -> None:
        """Raise AssertionError unless all are blocks that may be held."""
        check(all(block_id in self._ids for block_id in block_ids), f"{who}: no such blocks {block_ids}")

    def copy_to(self, other: FingerprintTier, moves: Moves) -> None:
        """Copy whole blocks, (source, target)."""
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        self.check_ids(sources, "copied from")
        other.check_ids(targets, "copied to")
        check(len(set(targets)) == len(targets), f"a block is written twice: {moves}")
        if other is self:
            check(set(sources).isdisjoint(targets), f"a block is read and written: {moves}")
        for source, target in moves:
            other._blocks[target] = dict(self._blocks.get(source, {}))


class FingerprintCache:
    """Device and host tier."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device = FingerprintTier(num_blocks)
        self.host = FingerprintTier(num_host_blocks + 1)

    def move_blocks(self, plan: SchedulerOutput) -> None:
        """What a worker does before its forward pass, in the same order."""
        self.device.copy_to(self.host, plan.swap_outs)
        self.host.copy_to(self.device, plan.swap_ins)
        self.device.copy_to(self.device, plan.block_copies)


def check(condition: bool, message: str) -> None:
    """`assert` that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)
