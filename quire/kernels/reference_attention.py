# SPDX-License-Identifier: Apache-2.0
"""Oracles of attention other than causal attention over a cache of keys and values: bidirectional and latent.

Latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434) is in its absorbed form. A token is stored as one vector of
R + D elements, the latent [R] and a rotated key [D] of all heads, in a cache [num_blocks, block_size, R + D],
contiguous, of any float dtype. A query is multiplied by its head's key up-projection, and the weighted sum of latents
by the value up-projection: so all heads read the same vectors, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata, check_bidirectional
from quire.kernels.formats import format_of
from quire.kernels.linear import PackedWeight
from quire.kernels.reference import paged_attention, quantized_input, rms_norm, rotary_embedding


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: GroupMetadata,
    /,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Bidirectional attention within each request: a new [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D] of one dtype, views with a token stride allowed; Hq and Hkv as in
    `paged_attention`. Requests are complete: each has as many rows as tokens, and no blocks. Score of positions i and
    j: s = scale * q.k; with `alibi_slopes` [Hq], s - slope * |i - j|; with `relative_bias` float32 [Hq, 2 * P - 1], s
    plus entry P - 1 + j - i, for requests of up to P tokens. With `window` w, only |i - j| < w is visible. Padding rows
    are 0. An incomplete request, or one longer than P, is an IndexError.
    """
    check_bidirectional(q, window, alibi_slopes, relative_bias)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        _check_whole(request, end - start, length, relative_bias)
        queries, keys, values = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        scores = queries @ keys.transpose(1, 2) * scale
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance.abs()
        if relative_bias is not None:
            scores = scores + relative_bias[:, relative_bias.shape[1] // 2 - distance]
        if window is not None:
            scores = scores.masked_fill(distance.abs() >= window, -torch.inf)
        out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out


def _check_whole(request: int, rows: int, length: int, relative_bias: Tensor | None) -> None:
    if rows != length:
        raise IndexError(f"bidirectional_attention: request {request} has {rows} rows of {length} tokens")
    most = length if relative_bias is None else relative_bias.shape[1] // 2 + 1
    if length > most:
        raise IndexError(
            f"bidirectional_attention: request {request} has {length} tokens, and there are biases for {most}"
        )


def per_head_linear(x: Tensor, weight: PackedWeight, /) -> Tensor:
    """Multiply each head by its own weight: x [T, Hq, K], strides allowed, weight [Hq * N, K] -> [T, Hq, N] of x's
    dtype.

    The heads' weights [N, K] are stacked in order; each multiplies as in `packed_linear`.
    """
    matrices = torch.unflatten(format_of(weight.scheme).multiplied(weight).float(), 0, (x.shape[1], -1))
    return torch.einsum("thk,hnk->thn", quantized_input(weight, x), matrices).to(x.dtype)


def write_latents(
    positions: Tensor,
    q: Tensor,
    rows: Tensor,
    norm: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    /,
    eps: float,
    interleaved: bool = False,
) -> None:
    """Store each token's normed latent and rotated key in its slot, and rotate its queries q [T, Hq, D] in place.

    rows [T, R + D] of q's dtype, a token stride allowed, unchanged; norm [R] of that dtype or float32; positions and
    cos_sin_cache [P, D] as in `rotary_embedding`, slot_mapping as in `write_kv`.
    """
    latents, keys = rms_norm(rows[:, : len(norm)], norm, eps), rows[:, None, len(norm) :].clone()
    rotary_embedding(positions, q, keys, cos_sin_cache, interleaved)
    kept = slot_mapping >= 0
    stored = torch.cat([latents, keys.squeeze(1)], 1)[kept].to(cache.dtype)
    cache.view(-1, cache.shape[2])[slot_mapping[kept]] = stored


def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, /, scale: float
) -> Tensor:
    """Causal attention of each request's last tokens over its cached latents: a new [T, Hq, R].

    q [T, Hq, R] and q_rope [T, Hq, D] of one dtype, strides allowed. The score of a query and a cached vector (c, k) is
    scale * (q.c + q_rope.k), and its value is c. Padding rows, and block ids, are as in `paged_attention`.
    """
    values = cache.unsqueeze(1)
    keys = values.transpose(2, 3)
    out = paged_attention(torch.cat([q, q_rope], 2), keys, values, metadata, scale)
    return out[..., : q.shape[2]].contiguous()
