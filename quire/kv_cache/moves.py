"""Copies of whole blocks that must be made before the next forward pass.

Invariant: all swap-outs are executed first, then all swap-ins, then all copies; that gives what was meant when
they were planned one by one, because a block that a planned move reads stays pinned until the plan is sealed, so
no later move of the same plan has it as its target.
"""

from __future__ import annotations

from typing import NamedTuple

Move = tuple[int, int]
"""(source, target) block ids."""


class PlannedMoves(NamedTuple):
    """The moves of one plan; in each list the targets are distinct and no source is a target."""

    swap_outs: list[Move]
    """From a device block to a host block."""
    swap_ins: list[Move]
    """From a host block to a device block."""
    block_copies: list[Move]
    """From a device block to a device block."""


class BlockMoves:
    """Collects the moves of the plan that is being made."""

    def __init__(self) -> None:
        self._swap_outs: dict[int, int] = {}  # host block -> device block
        self._swap_ins: list[Move] = []
        self._block_copies: dict[int, int] = {}  # target -> source

    def swap_out(self, device_block: int, host_block: int) -> None:
        """Plan a copy to the host; an earlier one to the same host block, evicted meanwhile, is moot."""
        self._swap_outs[host_block] = device_block

    def swap_in(self, host_block: int, device_block: int) -> None:
        """Plan a copy to the device."""
        self._swap_ins.append((host_block, device_block))

    def copy(self, source: int, target: int) -> None:
        """Plan a copy on the device; a copy of what is itself to be copied is one of the original."""
        self._block_copies[target] = self._block_copies.get(source, source)

    def take(self) -> PlannedMoves:
        """All moves planned since the last call."""
        swap_outs = [(device, host) for host, device in self._swap_outs.items()]
        block_copies = [(source, target) for target, source in self._block_copies.items()]
        moves = PlannedMoves(swap_outs, self._swap_ins, block_copies)
        self._swap_outs, self._swap_ins, self._block_copies = {}, [], {}
        return moves
