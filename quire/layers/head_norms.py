# SPDX-License-Identifier: Apache-2.0
"""Norms of queries and keys (Henry et al., 2020, arXiv:2010.04245), and norms over sharded rows.

`SharedRMSNorm` norms rows of which each rank has some units, such as heads. Each unit's sum of squares is computed by
itself, all-gathered and added in one fixed order of single-element operations. So the sum has the same bits at every
number of ranks and in every batch.

Shapes: x [..., D], T tokens of the step, h heads of size D, u units of a rank of size D, U all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.shard import WHOLE, Shard, ShardSpan
from quire.layers.slot import Slot, TensorPart, length
from quire.layers.vectors import LayerVector, VectorLayer

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod
from quire.layers.norm import LayerNorm, RMSNorm


class HeadRMSNorm(VectorLayer):
    """`x / rms(x) * weight` over the last dimension; the checkpoint has [h, D], or [D] without heads.

    Ranks hold the weights of their own heads; a row's weights are replicated.
    """

    vectors = (LayerVector("weight", "", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(
        self, *, size: int, heads: int | None = None, eps: float, dtype: torch.dtype, name: str
    ) -> None:
        self.has_heads = heads is not None
        super().__init__(ShardSpan(heads or 1, size, replicated=True), dtype=dtype, name=name)
        self.register_buffer("ones", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h, D], or [T, D] -> the same shape."""
        return ops.rms_norm(x, self.ones, self.eps) * self.weight.view(-1, self.span.unit)

    def _part(self, vector: LayerVector) -> TensorPart:
        part = super()._part(vector)
        return replace(part, stored=(self.span.units, self.span.unit)) if self.has_heads else part


class SharedRMSNorm(VectorLayer):
    """`x / rms(x) * weight`, over each of `groups` equal parts of a row's units.

    A rank that holds whole groups needs one pass over them. If a group is split over ranks, or with `by_units` (same
    bits at every number of ranks), sums of units are all-gathered.
    """

    vectors = (LayerVector("weight", "weight", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(
        self, span: ShardSpan, *, groups: int = 1, eps: float, dtype: torch.dtype, name: str
    ) -> None:
        self.groups, self.group_size, self.by_units = groups, span.size // groups, False
        super().__init__(span, dtype=dtype, name=name)
        self.register_buffer("ones", torch.ones(self.group_size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.is_summed = self.by_units or (shard.of > 1 and self.groups % shard.of > 0)
        self.group: Group | None = shard.group if self.is_summed and shard.group.size > 1 else None
        own = range(self.own.start // self.span.unit, self.own.stop // self.span.unit)
        self.num_units, self.per_group = len(own), self.span.units // self.groups
        self.groups_of_own = [unit // self.per_group for unit in own]
        self.copies = max(shard.of // self.span.units, 1)
        """Number of ranks that hold the same unit."""

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self.group is None else self.group.why_not_captured()

    def forward(self, x: Tensor) -> Tensor:
        """x [T, u * D] or [T, u, D] -> the same shape."""
        if self.is_summed:
            return self._by_units(x.reshape(len(x), self.num_units, self.span.unit)).view(x.shape)
        row = self.num_units * self.span.unit
        if row == self.group_size:
            return ops.rms_norm(x.reshape(len(x), row), self.weight, self.eps).view(x.shape)
        normed = ops.rms_norm(x.reshape(len(x), row // self.group_size, self.group_size), self.ones, self.eps)
        return (normed.view(len(x), row) * self.weight).view(x.shape)

    def _by_units(self, x: Tensor) -> Tensor:
        """x [T, u, D] -> the same shape."""
        wide = x.float()
        means = self._means(added_up(wide * wide))
        normed = wide * (1.0 / (means + self.eps).sqrt())[:, :, None]
        return (normed * self.weight.view(-1, self.span.unit)).to(x.dtype)

    def _means(self, sums: Tensor) -> Tensor:
        """Return the mean squares of the groups [T, u] that a rank's units belong to, from sums of squares [T, u]."""
        if self.group is not None:
            sums = ops.all_gather(sums, self.group)[:, :: self.copies]
        totals = added_up(sums.reshape(len(sums), self.groups, self.per_group)) / self.group_size
        if self.groups == 1:
            return totals
        return torch.stack([totals[:, group] for group in self.groups_of_own], 1)


def added_up(x: Tensor) -> Tensor:
    """Sum [..., N] -> [...] pairwise in a fixed order, adding elements half of N apart, whatever the other dimensions
    are.
    """
    while (count := x.shape[-1]) > 1:
        half = count // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((pairs, x[..., 2 * half :]), -1) if count % 2 else pairs
    return x[..., 0]


class EachHeadLayerNorm(VectorLayer):
    """LayerNorm without bias and with its own weight per head, [h, D].

    The checkpoint has them in one tensor or, if `apart`, as `norms.0`, `norms.1` ...
    """

    vectors = (LayerVector("weight", "weight", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(
        self, *, heads: int, head_dim: int, eps: float, dtype: torch.dtype, apart: bool, name: str
    ) -> None:
        super().__init__(ShardSpan(heads, head_dim, replicated=True), dtype=dtype, name=name)
        self.register_buffer("ones", torch.ones(head_dim, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h, D] -> the same shape."""
        return ops.layer_norm(x, self.ones, None, self.eps) * self.weight.view(-1, self.span.unit)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        if not self.apart:
            yield from super().slots(names)
            return
        size = self.span.unit
        for head in range(self.span.units):
            start = head * size - self.own.start
            is_own = 0 <= start < length(self.own)
            target = self.weight[start : start + size] if is_own else self.weight[:0]
            everything = slice(0, size)
            part = TensorPart((size,), (everything,), (everything if is_own else slice(0, 0),))
            yield f"{names[0]}.norms.{head}.weight", Slot(target, "ones", part)

    def _part(self, vector: LayerVector) -> TensorPart:
        return replace(super()._part(vector), stored=(self.span.units, self.span.unit))


def head_norm(config: EngineConfig, name: str, num_heads: int = 1) -> RMSNorm:
    """Return a norm without weights over each head, or over `num_heads` adjacent ones together."""
    arch = config.arch
    return RMSNorm(
        size=num_heads * arch.head_dim,
        eps=arch.norm_eps,
        dtype=activation_dtype(config),
        has_weight=False,
        name=name,
    )


def _rms(config: EngineConfig, heads: int, name: str) -> RMSNorm:
    arch = config.arch
    return RMSNorm(
        size=arch.head_dim,
        eps=arch.norm_eps,
        dtype=activation_dtype(config),
        offset=arch.norm_offset,
        name=name,
    )


def _unweighted_rms(config: EngineConfig, heads: int, name: str) -> RMSNorm:
    return head_norm(config, name)


def _row_rms(config: EngineConfig, heads: int, name: str) -> SharedRMSNorm:
    arch = config.arch
    span = ShardSpan(heads, arch.head_dim, replicated=True)
    return SharedRMSNorm(span, eps=arch.norm_eps, dtype=activation_dtype(config), name=name)


def _each_head_rms(config: EngineConfig, heads: int, name: str) -> HeadRMSNorm:
    arch = config.arch
    return HeadRMSNorm(
        size=arch.head_dim, heads=heads, eps=arch.norm_eps, dtype=activation_dtype(config), name=name
    )


def _layer(config: EngineConfig, heads: int, name: str) -> LayerNorm:
    arch = config.arch
    return LayerNorm(size=arch.head_dim, eps=arch.norm_eps, dtype=activation_dtype(config), name=name)


def _each_head_layer(config: EngineConfig, heads: int, name: str, apart: bool = False) -> EachHeadLayerNorm:
    arch = config.arch
    return EachHeadLayerNorm(
        heads=heads,
        head_dim=arch.head_dim,
        eps=arch.norm_eps,
        dtype=activation_dtype(config),
        apart=apart,
        name=name,
    )


def _each_head_layer_apart(config: EngineConfig, heads: int, name: str) -> EachHeadLayerNorm:
    return _each_head_layer(config, heads, name, apart=True)


QK_NORMS: dict[str, Callable[[EngineConfig, int, str], Module]] = {
    "rms": _rms,
    "rms_after_rope": _rms,
    "unweighted_rms": _unweighted_rms,
    "unweighted_rms_after_rope": _unweighted_rms,
    "row_rms": _row_rms,
    "each_head_rms": _each_head_rms,
    "layer": _layer,
    "each_head_layer": _each_head_layer,
    "each_head_layer_apart": _each_head_layer_apart,
}
"""Norms of q or k by name, for a number of heads: [T, h, D] -> the same shape."""

AFTER_ROPE = ("rms_after_rope", "unweighted_rms_after_rope")
"""Norms that are applied after the rotation."""

NORMED_IN_KERNEL = ("rms", "unweighted_rms")
"""Norms that the kernel that rotates and stores keys can fuse."""
