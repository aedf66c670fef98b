# SPDX-License-Identifier: Apache-2.0
"""Parts of attention that few models have.

ALiBi (Press et al., 2022, arXiv:2108.12409), attention sinks (Xiao et al., 2023, arXiv:2309.17453, as in gpt-oss, 2025,
arXiv:2508.10925), scaled queries at later positions (Nakanishi, 2025, arXiv:2501.19399, as in Llama 4) and a
checkpoint's KV cache scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import Temperature
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.shard import Shard, ShardSpan
from quire.layers.vectors import LayerVector, VectorLayer


def slopes(num_heads: int) -> Tensor:
    """Return the ALiBi slopes, float32 [num_heads], on the host: how much a score falls per token of distance.

    For a power of two n they are the powers of 2 ** (-8 / n). Other numbers take those of the next smaller power of
    two, then every other one of twice that power.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    powers = [2.0 ** (-8.0 / whole * (i + 1)) for i in range(whole)]
    between = [2.0 ** (-4.0 / whole * (2 * i + 1)) for i in range(num_heads - whole)]
    return torch.tensor(powers + between, dtype=torch.float32, device="cpu")


class CacheScales(Module):
    """KV cache scales of a checkpoint: the cache holds k / keys and v / values, both float32 [Hkv].

    Key scales are folded into queries and value scales into outputs, so kernels need not know them.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys.unsqueeze(-1), persistent=False)
        self.register_buffer("values", values.unsqueeze(-1), persistent=False)

    @staticmethod
    def of_rank(keys: Tensor, values: Tensor, shard: Shard, name: str) -> CacheScales:
        """Return the scales of a rank's heads, given those of all heads."""
        own = ShardSpan(len(keys), replicated=True).piece(shard, name)
        return CacheScales(keys[own], values[own])

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, Hkv, D] -> float32 values that the cache quantizes."""
        return k.float() / self.keys, v.float() / self.values

    def of_queries(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] -> queries for keys as they are stored."""
        return _scaled(q, self.keys)

    def of_outputs(self, out: Tensor) -> Tensor:
        """Attention outputs over stored values [T, Hq, D] -> over actual values."""
        return _scaled(out, self.values)


def _scaled(heads: Tensor, scales: Tensor) -> Tensor:
    """Multiply [T, Hq, D] by [Hkv, 1], each repeated for Hq / Hkv adjacent heads."""
    each = scales.repeat_interleave(heads.shape[1] // len(scales), dim=0)
    return (heads.float() * each).to(heads.dtype)


def for_all_heads(scales: Tensor, num_heads: int) -> Tensor:
    """Expand one scale, or one per head in any shape, to float32 [Hkv].

    Raises:
        ValueError: the count is neither 1 nor `num_heads`, or a value is not finite and positive.
    """
    flat = scales.float().flatten()
    if len(flat) not in (1, num_heads):
        raise ValueError(
            f"has {len(flat)} numbers; it must have 1, or {num_heads}, one for each key-value head"
        )
    if not (flat.isfinite() & (flat > 0)).all():
        raise ValueError(f"holds {flat[~(flat.isfinite() & (flat > 0))][0].item()}, which is no scale")
    return torch.broadcast_to(flat, (num_heads,)).clone()


class Sinks(VectorLayer):
    """Learned score per head that joins every softmax and has no value, float32 [Hq]; sharded by heads."""

    vectors = (LayerVector("weight", ""),)
    weight: Tensor

    def __init__(self, *, num_heads: int, name: str = "") -> None:
        super().__init__(ShardSpan(num_heads), name=name)


class TemperatureTuning(Module):
    """Query scaling by `1 + scale * log(1 + floor((position + offset) / interval))`."""

    table: Tensor

    def __init__(self, *, config: EngineConfig, temperature: Temperature) -> None:
        super().__init__()
        arch = config.arch
        with torch.device("cpu"):
            positions = torch.arange(config.model.max_model_len or arch.max_position_embeddings)
            steps = torch.floor((positions.float() + temperature.offset) / temperature.interval)
            table = (1.0 + temperature.scale * torch.log1p(steps)).to(activation_dtype(config))
        self.register_buffer("table", table.unsqueeze(1), persistent=False)

    def forward(self, positions: Tensor, q: Tensor) -> Tensor:
        """positions [T], q [T, Hq, D] -> the same shape."""
        return q * ops.embedding(positions, self.table).unsqueeze(-1)
