"""The torch oracles of latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434) in its absorbed form.

Invariant: as in `reference`. A latent is the key of all heads and, but for its last dimensions, their value.
"""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.formats import format_of
from quire.kernels.linear import PackedWeight
from quire.kernels.reference import paged_attention, rms_norm, rotary_embedding, seen_by


def per_head_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    matrices = torch.unflatten(format_of(weight.scheme).multiplied(weight).float(), 0, (x.shape[1], -1))
    return torch.einsum("thk,hnk->thn", seen_by(weight, x), matrices).to(x.dtype)


def write_latents(
    positions: Tensor,
    q: Tensor,
    rows: Tensor,
    norm: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool = False,
) -> None:
    latents, keys = rms_norm(rows[:, : len(norm)], norm, eps), rows[:, None, len(norm) :].clone()
    rotary_embedding(positions, q, keys, cos_sin_cache, interleaved)
    kept = slot_mapping >= 0
    stored = torch.cat([latents, keys.squeeze(1)], 1)[kept].to(cache.dtype)
    cache.view(-1, cache.shape[2])[slot_mapping[kept]] = stored


def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    values = cache.unsqueeze(1)
    keys = values.transpose(2, 3)
    out = paged_attention(torch.cat([q, q_rope], 2), keys, values, metadata, scale)
    return out[..., : q.shape[2]].contiguous()
