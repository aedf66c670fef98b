"""Norms of queries and keys, which keep attention's scores in bounds (Henry et al., 2020, arXiv:2010.04245).

Shapes: T tokens of the step, h heads of q or of k, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.head_norm import HeadRMSNorm
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.shard import Span
from quire.layers.shared_norm import SharedRMSNorm
from quire.layers.slot import Part, Slot, length
from quire.layers.vectors import Vector, VectorLayer


class EachHeadLayerNorm(VectorLayer):
    """A LayerNorm without bias and with a weight of its own for each head, [h, D].

    The checkpoint has them in one tensor or, if `apart`, as `norms.0`, `norms.1` ...
    """

    vectors = (Vector("weight", "weight", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(
        self, *, heads: int, head_dim: int, eps: float, dtype: torch.dtype, apart: bool, name: str
    ) -> None:
        super().__init__(Span(heads, head_dim, replicated=True), dtype=dtype, name=name)
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
            part = Part((size,), (everything,), (everything if is_own else slice(0, 0),))
            yield f"{names[0]}.norms.{head}.weight", Slot(target, "ones", part)

    def _part(self, vector: Vector) -> Part:
        return replace(super()._part(vector), stored=(self.span.units, self.span.unit))


def head_norm(config: EngineConfig, name: str, num_heads: int = 1) -> RMSNorm:
    """A norm without weights of each head, or of so many neighbours together."""
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
    span = Span(heads, arch.head_dim, replicated=True)
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
"""The norm of q, or of k, with so many heads and of that name: [T, h, D] -> the same shape."""

AFTER_ROPE = ("rms_after_rope", "unweighted_rms_after_rope")
"""Norms of what is rotated already."""

NORMED_IN_KERNEL = ("rms", "unweighted_rms")
"""What the kernel that rotates and stores keys can do on the way."""
