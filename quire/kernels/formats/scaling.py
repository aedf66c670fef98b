# SPDX-License-Identifier: Apache-2.0
"""Scales and shifts of groups of k: their representation, and their layout in panels.

A stream of them is float32, bfloat16 or float16 (a number for each group), uint8 (integer zero points), or int8. int8
holds blocks of 256 k, or fewer at the end: 16 steps in float16, then 16 factors for each group of the block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear import PANEL, to_panels

BLOCK = 256
"""Values of k whose groups share a step."""
STREAM_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""Stream types by their numbers in the C++ kernels: `enum Stream` of csrc/cpu/scaling.h."""
_STEP_BYTES = 2 * PANEL


class BlockScales(NamedTuple):
    """Scales, or minimums, of groups as in K-quants: integers times a step that a block of 256 k shares.

    `steps` is float16 [N, B], a step for each 256 values of k; the last block may be partial. `factors` is int8
    [N, G], of whole blocks. Their products are exact in float32.
    """

    factors: Tensor
    steps: Tensor

    def float(self) -> Tensor:
        """Return the number of each group in float32: [N, G]."""
        each = self.factors.shape[1] // self.steps.shape[1]
        return self.factors.float() * self.steps.float().repeat_interleave(each, 1)


def stream_shape(dtype: torch.dtype, panels: int, groups: int, group: int) -> tuple[int, ...]:
    """Return the shape of a stream of that many panels and groups of `group` values of k."""
    if dtype is not torch.int8:
        return panels, groups, PANEL
    blocks = -(-groups * group // BLOCK)
    return panels, blocks * _STEP_BYTES + groups * PANEL


def to_stream(of: Tensor | BlockScales, halves: int, groups: int) -> Tensor:
    """Convert [N, G] to panels, with zeros for further outputs and groups."""
    if isinstance(of, Tensor):
        return _by_group(F.pad(of, (0, groups - of.shape[1])), halves)
    blocks = of.steps.shape[1]
    steps = _by_group(of.steps, halves).view(torch.int8)
    factors = torch.unflatten(_by_group(of.factors, halves), 1, (blocks, -1))
    stream = torch.cat([steps, factors.flatten(2)], 2).flatten(1)
    return stream[:, : blocks * _STEP_BYTES + groups * PANEL].contiguous()


def from_stream(stream: Tensor, group: int) -> Tensor:
    """Invert `to_stream` for groups of `group` values of k; blocks become their products: [P, 16, G]."""
    if stream.dtype is not torch.int8:
        return stream.transpose(1, 2)
    block_bytes = _STEP_BYTES + BLOCK // group * PANEL
    blocks = torch.unflatten(F.pad(stream, (0, -stream.shape[1] % block_bytes)), 1, (-1, block_bytes))
    steps = blocks[..., :_STEP_BYTES].contiguous().view(torch.float16).float()
    factors = torch.unflatten(blocks[..., _STEP_BYTES:], 2, (-1, PANEL)).float()
    return (factors * steps.unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def _by_group(rows: Tensor, halves: int) -> Tensor:
    return to_panels(rows, halves).transpose(1, 2).contiguous()
