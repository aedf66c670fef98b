# SPDX-License-Identifier: Apache-2.0
"""Relative position bias of attention (T5; Raffel et al., 2020, arXiv:1910.10683, section 2.1).

Shapes: Hq query heads, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Layer, activation_dtype, parameter
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import Slot, TensorPart, length

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod

FARTHEST = 128
"""Distance from which on all distances share one bucket, unless a checkpoint says otherwise."""


class RelativeBias(Layer):
    """Learned offset of scores per head and bucket of distances.

    Half of the `buckets` are for keys after the query, unless attention is `causal`. Of the buckets of one direction
    the first half are single distances, and the others cover ever more of them, up to `farthest`.

    Args:
        num_heads: all heads, of which a rank holds its own.
        longest: P.
    """

    buckets: Tensor
    table: Tensor
    """float32 [Hq, 2 * P - 1], for the rank's heads, as `ops.bidirectional_attention` takes it."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        buckets: int,
        name: str,
        num_heads: int | None = None,
        longest: int | None = None,
        causal: bool = False,
        farthest: int = FARTHEST,
    ) -> None:
        super().__init__(name)
        arch = config.arch
        self.heads = ShardSpan(arch.num_heads if num_heads is None else num_heads)
        self.num_buckets, self.dtype = buckets, activation_dtype(config)
        self.create_weights(None)
        longest = longest or config.model.max_model_len or arch.max_position_embeddings
        with torch.device("cpu"):
            found = buckets_of(longest, buckets, causal=causal, farthest=farthest)
            self.register_buffer("buckets", found, persistent=False)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        self.shard, self.own = shard, self.heads.piece(shard, self.name)
        self.weight = parameter(self.num_buckets, length(self.own), dtype=self.dtype)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        buckets, heads = slice(0, self.num_buckets), slice(0, self.heads.units)
        part = TensorPart((self.num_buckets, self.heads.units), (buckets, heads), (buckets, self.own))
        yield f"{names[0]}.weight", Slot(self.weight, "normal", part)

    def finish_loading(self) -> None:
        by_distance = self.weight.float()[self.buckets.to(self.weight.device)]
        self.register_buffer("table", by_distance.t().contiguous(), persistent=False)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        self.finish_loading()


def buckets_of(longest: int, count: int, *, causal: bool = False, farthest: int = FARTHEST) -> Tensor:
    """Return int64 [2 * longest - 1]: the bucket of key minus query position, from 1 - longest to longest - 1."""
    offsets = torch.arange(1 - longest, longest)
    half = count if causal else count // 2
    single = half // 2
    distance = (-offsets).clamp(min=0) if causal else offsets.abs()
    steps = torch.log(distance.clamp(min=1).float() / single) / math.log(farthest / single) * (half - single)
    far = (single + steps.long()).clamp(max=half - 1)
    found = torch.where(distance < single, distance, far)
    return found if causal else found + half * (offsets > 0)
