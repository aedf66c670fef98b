"""Scales with which a checkpoint wants keys and values kept in few bits: a number for each key-value head."""

import torch
from torch import Tensor

from quire.layers.base import Module
from quire.layers.shard import Shard, Span


class CacheScales(Module):
    """What the cache holds is k / keys and v / values, both float32 [Hkv].

    Scales of keys go into queries, those of values into what attention gives, so kernels need not know of them.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys.unsqueeze(-1), persistent=False)
        self.register_buffer("values", values.unsqueeze(-1), persistent=False)

    @staticmethod
    def of_rank(keys: Tensor, values: Tensor, shard: Shard, name: str) -> "CacheScales":
        """Those of a rank's heads, of the scales of all."""
        own = Span(len(keys), replicated=True).piece(shard, name)
        return CacheScales(keys[own], values[own])

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, Hkv, D] -> what the cache rounds, in float32."""
        return k.float() / self.keys, v.float() / self.values

    def of_queries(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] -> what is multiplied by keys as they are stored."""
        return _scaled(q, self.keys)

    def of_outputs(self, out: Tensor) -> Tensor:
        """Mixed values as they are stored, [T, Hq, D] -> mixed values."""
        return _scaled(out, self.values)


def _scaled(heads: Tensor, scales: Tensor) -> Tensor:
    """[T, Hq, D] times [Hkv, 1], which Hq / Hkv neighbours share."""
    each = scales.repeat_interleave(heads.shape[1] // len(scales), dim=0)
    return (heads.float() * each).to(heads.dtype)


def for_all_heads(scales: Tensor, num_heads: int) -> Tensor:
    """One number, or one for each head, in any shape -> float32 [Hkv].

    Raises:
        ValueError: there are more or fewer, or one is no scale.
    """
    flat = scales.float().flatten()
    if len(flat) not in (1, num_heads):
        raise ValueError(
            f"has {len(flat)} numbers; it must have 1, or {num_heads}, one for each key-value head"
        )
    if not (flat.isfinite() & (flat > 0)).all():
        raise ValueError(f"holds {flat[~(flat.isfinite() & (flat > 0))][0].item()}, which is no scale")
    return torch.broadcast_to(flat, (num_heads,)).clone()
