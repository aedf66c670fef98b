"""States of fixed size that a layer keeps for each request, and each token replaces.

Invariant: a state is float32 whatever the model's dtype, because what is added up over a whole sequence shows each
rounding; and a layer never looks up where its states lie: its ops are given its views and the step's `StateMetadata`.
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
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.slot import length
from quire.layers.step import StepContext

ALIGNMENT = 64
"""Bytes of which the place of each part is a multiple."""
CHECKPOINT_TOKENS = 512
"""About how often a state is kept for other requests to resume from: a state is as large as the keys and values of
hundreds of tokens, so that more of them would cost more than the attention that they replace."""

Shape = Sequence[int | tuple[Span, ...]]
"""Of a part of what is kept; sizes that are cut for several ranks are the spans that make them up."""


class StateCache(Module):
    """The states of one layer: one or more parts, each of a shape of its own.

    Args:
        name: identifies the layer's cache; unique in the model.
        parts: shapes of what is kept of a request.
    """

    def __init__(self, *, config: EngineConfig, name: str, parts: Sequence[Shape]) -> None:
        super().__init__()
        self.name = name
        self.parts = tuple(parts)
        self.shapes = self._cut_for(WHOLE)
        self.views: tuple[Tensor, ...] = ()
        """Of each part [blocks, *shape] float32, for the ops that read and replace it."""
        self._block_size = config.cache.block_size
        self._has_kernels = bool(ops.causal_conv.supporting(device_type(config), activation_dtype(config)))
        self._group_id = 0

    def take_share(self, shard: Shard) -> None:
        self.shapes = self._cut_for(shard)

    def _cut_for(self, shard: Shard) -> tuple[tuple[int, ...], ...]:
        def size(of: int | tuple[Span, ...]) -> int:
            return of if isinstance(of, int) else sum(length(span.piece(shard, self.name)) for span in of)

        return tuple(tuple(map(size, part)) for part in self.parts)

    @property
    def group_id(self) -> int:
        """Of the group whose block tables say where its states lie."""
        return self._group_id

    def metadata(self, step: StepContext) -> StateMetadata:
        """Whose states the step reads, and where it leaves them."""
        return step.metadata(self._group_id, StateMetadata)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        checkpoint_blocks = max(CHECKPOINT_TOKENS // self._block_size, 1)
        return RecurrentStateSpec(self._block_size, sum(map(_room, self.shapes)), checkpoint_blocks)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; the parts of a block lie one behind the other."""
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
        """See `CacheUser`; a device that has a kernel for one of these layers has one for each."""
        return None if self._has_kernels else "layers with a state by reference cannot be captured"


def _room(shape: tuple[int, ...]) -> int:
    """Bytes that a part takes."""
    return -(-4 * math.prod(shape) // ALIGNMENT) * ALIGNMENT
