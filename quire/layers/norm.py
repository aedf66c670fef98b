# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) and LayerNorm.

Shapes: x [..., H], residual [T, H], T tokens of the step, H hidden size (or head size, for norms of q and k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.linear import QuantizedRows
from quire.layers.base import Layer, activation_dtype, parameter
from quire.layers.slot import Slot


class RMSNorm(Layer):
    """`x / rms(x) * weight`, without the factor if not `has_weight`.

    With `offset` 1 the checkpoint stores the weight minus one, as Gemma's does. The one is added once, while loading,
    and the sum is kept in float32, which gives the same result as adding it at every use.
    """

    weight: Tensor

    def __init__(
        self,
        *,
        size: int,
        eps: float,
        dtype: torch.dtype,
        has_weight: bool = True,
        offset: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__(name)
        if has_weight:
            self.weight = parameter(size, dtype=torch.float32 if offset else dtype)
        else:
            self.register_buffer("weight", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.has_weight = has_weight
        self.eps = eps
        self.offset = offset
        self._norm: Callable[..., Any] = ops.rms_norm
        self._add_and_norm: Callable[..., Any] = ops.fused_add_rms_norm

    def forward(self, x: Tensor) -> Tensor | QuantizedRows:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
        """Return `(norm(x + residual), x + residual)`; with residual None, x becomes the residual."""
        if residual is None:
            return self.forward(x), x
        return self._add_and_norm(x, residual, self.weight, self.eps)

    def quantize_rows(self) -> None:
        self._norm, self._add_and_norm = ops.rms_norm_fp8, ops.fused_add_rms_norm_fp8

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        if self.has_weight:
            convert = self._completed if self.offset else None
            yield f"{names[0]}.weight", Slot(self.weight, "ones", convert=convert)

    def _completed(self, stored: Tensor) -> Tensor:
        return stored.float() + self.offset


class LayerNorm(Layer):
    """`(x - mean) / std * weight + bias`; a model may have both, the weight alone, or neither.

    `offset` is as in `RMSNorm`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        *,
        size: int,
        eps: float,
        dtype: torch.dtype,
        has_weight: bool = True,
        has_bias: bool = True,
        offset: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__(name)
        kept = torch.float32 if offset else dtype
        if has_weight:
            self.weight = parameter(size, dtype=kept)
        else:
            self.register_buffer("weight", torch.ones(size, dtype=dtype, device="cpu"), persistent=False)
        self.bias = parameter(size, dtype=kept) if has_bias else None
        self.has_weight = has_weight
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`."""
        if residual is None:
            return self.forward(x), x
        return ops.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        if self.has_weight:
            convert = self._completed if self.offset else None
            yield f"{names[0]}.weight", Slot(self.weight, "ones", convert=convert)
        if self.bias is not None:
            yield f"{names[0]}.bias", Slot(self.bias, "zeros")

    def _completed(self, stored: Tensor) -> Tensor:
        return stored.float() + self.offset


def block_norm(config: EngineConfig, name: str, eps: float | None = None) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states of the model's kind, optionally with its own epsilon."""
    arch, dtype = config.arch, activation_dtype(config)
    eps = arch.norm_eps if eps is None else eps
    offset = arch.norm_offsets.get(name.rpartition(".")[2], arch.norm_offset)
    if arch.norm == "rms":
        return RMSNorm(
            size=arch.hidden_size, eps=eps, dtype=dtype, has_weight=arch.norm_weight, offset=offset, name=name
        )
    return LayerNorm(
        size=arch.hidden_size,
        eps=eps,
        dtype=dtype,
        has_weight=arch.norm_weight,
        has_bias=arch.norm_bias,
        offset=offset,
        name=name,
    )
