# SPDX-License-Identifier: Apache-2.0
"""Fixed-size recurrent state per request, which each token updates.

Invariant: a state is float32 whatever the model's dtype, because sums over a whole sequence accumulate rounding. A
layer never computes where its states are stored: its ops get its views and the step's `StateMetadata`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import StateMetadata
from quire.kv_cache.spec import KVCacheSpec, RecurrentStateSpec
from quire.layers.base import Module, activation_dtype, device_type
from quire.layers.kv_cache import cache_planes
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import length
from quire.layers.step import StepContext

ALIGNMENT = 64
"""Alignment in bytes of each part of a state."""
CHECKPOINT_TOKENS = 512
"""Approximate distance of state checkpoints for prefix caching. A state is as large as the keys and values of hundreds
of tokens, so more checkpoints would cost more than the attention that they replace.
"""

Shape = Sequence[int | tuple[ShardSpan, ...]]
"""Shape of a part of a state; a sharded size is given as the spans that make it up."""


class StateCache(Module):
    """Recurrent state of one layer: one or more parts, each with its own shape.

    Args:
        name: identifies the layer's cache; unique in the model.
        parts: shapes of a request's state.
    """

    def __init__(self, *, config: EngineConfig, name: str, parts: Sequence[Shape]) -> None:
        super().__init__()
        self.name = name
        self.parts = tuple(parts)
        self.shapes = self._cut_for(WHOLE)
        self.views: tuple[Tensor, ...] = ()
        """[blocks, *shape] float32 per part, which ops read and update."""
        self._block_size = config.cache.block_size
        self._has_kernels = bool(ops.causal_conv.supporting(device_type(config), activation_dtype(config)))
        self._group_id = 0

    def apply_shard(self, shard: Shard) -> None:
        self.shapes = self._cut_for(shard)

    def _cut_for(self, shard: Shard) -> tuple[tuple[int, ...], ...]:
        def size(of: int | tuple[ShardSpan, ...]) -> int:
            return of if isinstance(of, int) else sum(length(span.piece(shard, self.name)) for span in of)

        return tuple(tuple(map(size, part)) for part in self.parts)

    @property
    def group_id(self) -> int:
        """KV cache group whose block tables locate the states."""
        return self._group_id

    def metadata(self, step: StepContext) -> StateMetadata:
        """Return the step's metadata: which states it reads and where it writes them."""
        return step.metadata(self._group_id, StateMetadata)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        checkpoint_blocks = max(CHECKPOINT_TOKENS // self._block_size, 1)
        return RecurrentStateSpec(self._block_size, sum(map(_room, self.shapes)), checkpoint_blocks)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; the parts of a block are adjacent."""
        assert isinstance(spec, RecurrentStateSpec), f"a state has no place in {type(spec).__name__}"
        self._group_id = group_id
        (blocks,) = cache_planes(spec, tensor)
        views, first = [], 0
        for shape in self.shapes:
            part = blocks[:, first : first + 4 * math.prod(shape)]
            views.append(part.view(torch.float32).unflatten(1, shape))
            first += _room(shape)
        self.views = tuple(views)

    def why_not_captured(self) -> str | None:
        """See `CacheUser`; a device with a kernel for one of these layers has one for each."""
        return None if self._has_kernels else "layers with a state by reference cannot be captured"


def _room(shape: tuple[int, ...]) -> int:
    """Return the aligned bytes of a part."""
    return -(-4 * math.prod(shape) // ALIGNMENT) * ALIGNMENT
