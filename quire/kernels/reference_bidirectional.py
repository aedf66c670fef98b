"""The plain-torch oracle of attention in both directions: one request after the other."""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata, check_bidirectional


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: GroupMetadata,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
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
