"""RMS norms of a row, or of each of its heads with weights of its own, by the bare name of their tensor.

Shapes: T tokens of the step, h heads of size D.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import ops
from quire.layers.shard import Span
from quire.layers.slot import Part
from quire.layers.vectors import Vector, VectorLayer


class HeadRMSNorm(VectorLayer):
    """`x / rms(x) * weight` over the last dimension; the checkpoint has [h, D], or [D] where there are no heads.

    Ranks have the weights of their own heads, and those of a row in common.
    """

    vectors = (Vector("weight", "", "ones"),)
    weight: Tensor
    ones: Tensor

    def __init__(
        self, *, size: int, heads: int | None = None, eps: float, dtype: torch.dtype, name: str
    ) -> None:
        self.has_heads = heads is not None
        super().__init__(Span(heads or 1, size, replicated=True), dtype=dtype, name=name)
        self.register_buffer("ones", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h, D], or [T, D] -> the same shape."""
        return ops.rms_norm(x, self.ones, self.eps) * self.weight.view(-1, self.span.unit)

    def _part(self, vector: Vector) -> Part:
        part = super()._part(vector)
        return replace(part, stored=(self.span.units, self.span.unit)) if self.has_heads else part
