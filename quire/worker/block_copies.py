# SPDX-License-Identifier: Apache-2.0
"""Copies of whole KV cache blocks: between the device and the host tier, and on the device.

Invariant: block ids are checked here before they index anything. A block is copied whole in every tensor [blocks,
bytes], whatever the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.scheduler.output import SchedulerOutput

Moves = list[tuple[int, int]]

CopyBlocks = Callable[[Sequence[Tensor], Sequence[Tensor], Moves], None]
"""Copies blocks from each source tensor to the target at its index; moves are checked (source block, target block)."""


class BlockCopier:
    """Executor of the block moves of a plan.

    Args:
        device: cache tensors, shared by all layers.
        host: tensors of the host tier, of the same shapes but for the number of blocks.
        copy: copies blocks in the order of the device's other work.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], copy: CopyBlocks) -> None:
        assert len(device) == len(host), "one host tensor for each of the device"
        self._device = device
        self.host = host
        self._copy_blocks = copy

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> None:
        """Execute the plan's swap-outs, swap-ins and copies, in this order.

        Raises:
            EngineError: a block is out of range, written twice, or both read and written; nothing of that list is
                copied.
        """
        self._copy("swap_outs", plan.swap_outs, self._device, self.host)
        self._copy("swap_ins", plan.swap_ins, self.host, self._device)
        self._copy("block_copies", plan.block_copies, self._device, self._device)

    def _copy(self, name: str, moves: Moves, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if not moves:
            return
        source_ids, target_ids = ([*ids] for ids in zip(*moves, strict=True))
        _check_range(f"{name} from", source_ids, sources)
        _check_range(f"{name} to", target_ids, targets)
        if len(set(target_ids)) < len(target_ids):
            raise EngineError(f"{name} {moves} write a block twice")
        if sources is targets and set(source_ids) & set(target_ids):
            raise EngineError(f"{name} {moves} read and write the same block")
        self._copy_blocks(sources, targets, moves)


_LARGE_BYTES = 1 << 14
"""Bytes from which copying a block takes longer than asking for it."""


def copy_on_host(sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
    """Copy blocks on a CPU (`CopyBlocks`)."""
    source_ids, target_ids = np.array(moves).T
    for source, target in zip(sources, targets, strict=True):
        of, to = _elements(source), _elements(target)
        if of.itemsize < _LARGE_BYTES:
            to[target_ids] = of[source_ids]
            continue
        of, to = of.view(np.uint8).reshape(len(of), -1), to.view(np.uint8).reshape(len(to), -1)
        for source_id, target_id in moves:  # at once they would be gathered first, and then scattered
            to[target_id] = of[source_id]


def _elements(tensor: Tensor) -> NDArray[Any]:
    """Return a view [blocks] with each block as one element: torch scatters bytes one by one, at 0.5 GiB/s."""
    content = tensor.view(torch.uint8)
    return content.numpy().view(f"V{content.shape[1]}")[:, 0]


def _check_range(what: str, block_ids: list[int], tensors: Sequence[Tensor]) -> None:
    """Check the ids; block 0 is the null block of either tier."""
    num_blocks = min(map(len, tensors))
    if min(block_ids) <= 0 or max(block_ids) >= num_blocks:
        raise EngineError(f"{what} blocks {block_ids}: ids must be in [1, {num_blocks})")
