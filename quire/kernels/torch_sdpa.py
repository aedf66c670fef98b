"""Paged attention by torch's own `scaled_dot_product_attention`, one request at a time.

Invariant: it needs nothing but torch, so it runs wherever torch does. Keys and values are gathered from their blocks
for every call, which costs memory and time; it is for comparison, and for devices that have no other kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features
from quire.kernels.reference import gather_blocks, seen_keys


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `ops.paged_attention`.

    Raises:
        NotImplementedError: with a soft cap or sinks, which torch's attention does not have.
    """
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks)
    if soft_cap is not None:
        raise NotImplementedError("scaled_dot_product_attention has no soft cap")
    if sinks is not None:
        raise NotImplementedError("scaled_dot_product_attention has no sinks")
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    # Distances times slopes are added to the scores, for which 16 bits are too coarse.
    dtype = q.dtype if alibi_slopes is None else torch.float32
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        keys, values = gather_blocks(k_cache, v_cache, metadata.block_tables[request : request + 1], seq_len)
        distance = _distance(rows.stop - rows.start, seq_len, q.device)
        seen = seen_keys(distance, seq_len, sliding_window, attention_chunk)
        # Memory that no query sees can hold NaN, which a weight of 0 would not cancel.
        unseen = ~seen.any(0)[:, None]
        mixed = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0).to(dtype),
            keys.masked_fill(unseen, 0.0).to(dtype),
            values.masked_fill(unseen, 0.0).to(dtype),
            attn_mask=seen if alibi_slopes is None else _bias(seen, distance, alibi_slopes),
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = mixed[0].transpose(0, 1)
    return out


def _distance(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """Query position minus key position, [query_len, seq_len]; negative = a future key."""
    positions = torch.arange(seq_len, device=device)
    return positions[seq_len - query_len :, None] - positions


def _bias(seen: Tensor, distance: Tensor, slopes: Tensor) -> Tensor:
    """What is added to the scores: float32 [Hq, query_len, seq_len]."""
    return (-slopes.float()[:, None, None] * distance).masked_fill(~seen, -torch.inf)
