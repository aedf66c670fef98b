# SPDX-License-Identifier: Apache-2.0
"""Transformer block of towers: attention in both directions and an MLP, computed in slices.

Shapes: n patches, C channels, h heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.kernels.attention_metadata import GroupMetadata
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.linear import GateUpLinear, Linear, QKVLinear, UnbiasedKeyQKVLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.multimodal.towers.base import NO_STEP, LearnedTable, chunks

_LANES = 8
_NEVER = -6e4  # Also a number of float16.


@dataclass(frozen=True)
class BlockShape:
    """Sizes, options and checkpoint names of a tower's blocks; names are relative to the block."""

    channels: int
    heads: int
    head_dim: int
    inner: int
    eps: float
    activate: Callable[[Tensor], Tensor]
    norm: str = "layer"  # "layer" or "rms"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    gated: str = ""  # Activation of a gated MLP; empty: a plain one, with `activate`.
    key_bias: bool = True
    qk_norm: bool = False  # RMS norm over all heads together.
    scaled: bool = False  # Outputs of attention and MLP are scaled per channel.
    interleaved: bool = False  # Rotary angles rotate neighbors, not halves.
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    qkv: str = "self_attn.qkv_proj"
    out: str = "self_attn.out_proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    norms_before: bool = (
        True  # Norms come before attention and MLP; otherwise after the sums with their input.
    )
    scale: float | None = None  # Of scores; None: 1 / sqrt(head_dim).


def tower_norm(config: EngineConfig, kind: str, size: int, eps: float, name: str) -> LayerNorm | RMSNorm:
    """Return a norm of a kind, "layer" or "rms"."""
    dtype = activation_dtype(config)
    if kind == "rms":
        return RMSNorm(size=size, eps=eps, dtype=dtype, name=name)
    return LayerNorm(size=size, eps=eps, dtype=dtype, name=name)


class SlicedBlock(Module):
    """Base of blocks: attention in both directions, computed in slices; subclasses have the rest."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape

    def slices(
        self,
        x: Tensor,
        metadata: GroupMetadata,
        angles: Tensor | None = None,
        relative_bias: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Generator[None, None, Tensor]:
        """Compute x [n, C] -> [n, C]; sequences attend within themselves.

        `angles` [n, D] are cosines and then sines by which heads are rotated; None: they are not. `relative_bias` is as
        `ops.bidirectional_attention` takes it. `hidden` [n] are the rows to which no row attends; None: there are none.
        """
        shape = self.shape
        q, k, v = (x.new_empty(len(x), shape.heads, shape.head_dim) for _ in range(3))
        per_row = 2 * shape.channels * shape.heads * shape.head_dim
        for rows in chunks(len(x), 3 * per_row):
            q[rows], k[rows], v[rows] = self._heads(x[rows], None if angles is None else angles[rows])
            yield
        if hidden is not None:
            q, k, v = _with_hidden(q, k, v, hidden)
        attended = torch.empty_like(q)
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        per_head = 4.0 * len(x) * metadata.max_seq_len * shape.head_dim
        for own in chunks(shape.heads, per_head, least=1):
            bias = None if relative_bias is None else relative_bias[own]
            attended[:, own] = ops.bidirectional_attention(
                q[:, own], k[:, own], v[:, own], metadata, scale, relative_bias=bias
            )
            yield
        out = torch.empty_like(x)
        for rows in chunks(len(x), per_row + 6 * shape.channels * shape.inner):
            out[rows] = self._rest(x[rows], attended[rows, :, : shape.head_dim].flatten(1))
            yield
        return out

    def _heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, C], angles [n, D] -> queries, keys and values [n, h, D]."""
        raise NotImplementedError

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [n, C] and the output of attention [n, h * D] -> the block's output [n, C]."""
        raise NotImplementedError


class TowerBlock(SlicedBlock):
    """`x + attention(norm(x))`, and then `x + mlp(norm(x))`, or each norm of such a sum."""

    def __init__(self, *, config: EngineConfig, shape: BlockShape, at: str) -> None:
        super().__init__(shape)
        dtype, size = model_dtype(config), shape.channels
        wide = shape.heads * shape.head_dim
        first, second = (f"{at}.{name}" for name in shape.norms)
        self.norm1 = tower_norm(config, shape.norm, size, shape.eps, first)
        self.norm2 = tower_norm(config, shape.norm, size, shape.eps, second)
        projections = QKVLinear if shape.key_bias else UnbiasedKeyQKVLinear
        self.qkv = projections(
            hidden_size=size,
            num_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_dim=shape.head_dim,
            bias=shape.qkv_bias,
            dtype=dtype,
            name=f"{at}.{shape.qkv}",
        )
        self.out = Linear(
            in_features=wide, out_features=size, bias=shape.out_bias, dtype=dtype, name=f"{at}.{shape.out}"
        )
        self.up = self._up(dtype, at)
        self.down = Linear(
            in_features=shape.inner,
            out_features=size,
            bias=shape.mlp_bias,
            dtype=dtype,
            name=f"{at}.{shape.mlp[1]}",
        )
        self.qk_norms: torch.nn.ModuleList | None = None
        if shape.qk_norm:
            beside = f"{at}.{shape.qkv.rpartition('.')[0]}"
            self.qk_norms = torch.nn.ModuleList(
                tower_norm(config, "rms", wide, 1e-6, f"{beside}.{each}_norm") for each in ("q", "k")
            )
        self.scales: torch.nn.ModuleList | None = None
        if shape.scaled:
            self.scales = torch.nn.ModuleList(
                LearnedTable(size, config=config, name=f"{at}.lambda_{number}") for number in (1, 2)
            )

    def _up(self, dtype: torch.dtype, at: str) -> Linear:
        shape, name = self.shape, f"{at}.{self.shape.mlp[0]}"
        if shape.gated:
            return GateUpLinear(
                hidden_size=shape.channels,
                intermediate_size=shape.inner,
                bias=shape.mlp_bias,
                dtype=dtype,
                activation=shape.gated,
                name=name,
            )
        return Linear(
            in_features=shape.channels, out_features=shape.inner, bias=shape.mlp_bias, dtype=dtype, name=name
        )

    def _heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.heads(self.norm1(x) if self.shape.norms_before else x, NO_STEP)
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            q = q_norm(q.flatten(1)).view(q.shape)
            k = k_norm(k.flatten(1)).view(k.shape)
        if angles is not None:
            places = torch.arange(len(x), device=x.device)
            q, k = ops.rotary_embedding(places, q, k, angles, self.shape.interleaved)
        return q, k, v

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self._scaled(self.out(attended, NO_STEP), 0)
        if not self.shape.norms_before:
            x = self.norm1(x)
        inner = self.up(self.norm2(x) if self.shape.norms_before else x, NO_STEP)
        if not self.shape.gated:
            inner = self.shape.activate(inner)
        x = x + self._scaled(self.down(inner, NO_STEP), 1)
        return x if self.shape.norms_before else self.norm2(x)

    def _scaled(self, x: Tensor, which: int) -> Tensor:
        if self.scales is None:
            return x
        scale = self.scales[which]
        assert isinstance(scale, LearnedTable)
        return x * scale.weight


def _with_hidden(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads with a further dimension, of several for alignment, by which no score of a hidden row counts."""
    size = q.shape[-1]
    q, k, v = (F.pad(x, (0, _LANES)) for x in (q, k, v))
    q[..., size] = 1.0
    k[..., size] = (hidden * _NEVER).to(k.dtype)[:, None]
    return q, k, v
