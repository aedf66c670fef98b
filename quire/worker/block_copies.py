"""Copies of whole KV cache blocks: between the device and the host tier, and on the device.

Invariant: block ids are checked here before they index anything. A block is copied as a whole, in every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.scheduler.output import SchedulerOutput

_BLOCK_DIM = 1
"""Of a cache tensor [2, blocks, bytes], keys first."""

Moves = list[tuple[int, int]]


class BlockCopier:
    """Carries out the block moves of a plan.

    Args:
        device: the cache tensors, which all layers share.
        host: as many tensors of the same shapes but for the number of blocks, in host memory. (On a GPU: pinned, and
            copied to and from on a stream of its own, which the forward pass waits for.)
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        assert len(device) == len(host), "one host tensor for each of the device"
        self._device = device
        self._host = host

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> None:
        """Make the plan's swap-outs, swap-ins and copies, in this order.

        Raises:
            EngineError: a block is out of range, or written twice, or both read and written; nothing of that list
                was copied.
        """
        _copy("swap_outs", plan.swap_outs, self._device, self._host)
        _copy("swap_ins", plan.swap_ins, self._host, self._device)
        _copy("block_copies", plan.block_copies, self._device, self._device)


def _copy(name: str, moves: Moves, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if not moves:
        return
    source_ids, target_ids = ([*ids] for ids in zip(*moves, strict=True))
    _check_range(f"{name} from", source_ids, sources)
    _check_range(f"{name} to", target_ids, targets)
    if len(set(target_ids)) < len(target_ids):
        raise EngineError(f"{name} {moves} write a block twice")
    if sources is targets and set(source_ids) & set(target_ids):
        raise EngineError(f"{name} {moves} read a block that they write")
    for source, target in zip(sources, targets, strict=True):
        read = torch.tensor(source_ids, device=source.device)
        content = source.index_select(_BLOCK_DIM, read).to(target.device)
        target.index_copy_(_BLOCK_DIM, torch.tensor(target_ids, device=target.device), content)


def _check_range(what: str, block_ids: list[int], tensors: Sequence[Tensor]) -> None:
    """Block 0 is the null block of either tier."""
    num_blocks = min(tensor.shape[_BLOCK_DIM] for tensor in tensors)
    if min(block_ids) <= 0 or max(block_ids) >= num_blocks:
        raise EngineError(f"{what} blocks {block_ids}: they must be in [1, {num_blocks})")
