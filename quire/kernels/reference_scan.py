# SPDX-License-Identifier: Apache-2.0
"""Torch oracles of recurrent layers: causal convolution, Mamba, Mamba 2, delta rule, RG-LRU and RWKV-7.

`states` [num_blocks, ...] float32 is a layer's view of its part of the cache, each block's state contiguous.
`StateMetadata` says which states the T rows start from and where they write them; a state outside the cache is an
IndexError. Tensors with rows have any float dtype and may be strided; others are float32. C is channels, N states per
channel.

Invariant: as in `reference`; padding rows are 0; a token's result is computed from the previous state in the same way
in any chunking. This module and `csrc/cpu/states.h` are the only readers of a table of states, whose contents
`RecurrentStateSpec` defines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata


class StatePiece(NamedTuple):
    """Rows [first, last) of a step, all of one request: from the state in one block to that in another.

    Pieces of a request are in order, and each starts from the state that the previous one wrote.
    """

    first: int
    last: int
    source: int
    """Block of the state before the first row; 0: the request starts here, from zeros."""
    target: int
    """Block of the state after the last row; it may be the source. 0: none, for the rows are drafts."""


def state_pieces(metadata: StateMetadata, num_blocks: int) -> Iterator[StatePiece]:
    """Yield the pieces of a step, request by request, skipping padding rows and requests of length 0.

    Raises:
        IndexError: a state's block is outside the cache of `num_blocks`.
    """
    parts = (metadata.query_start_loc, metadata.seq_lens, metadata.kept, metadata.block_tables)
    bounds, ends, kept, tables = (part.tolist() for part in parts)
    for first, last, end, num_kept, table in zip(bounds[:-1], bounds[1:], ends, kept, tables, strict=True):
        if first < last and end > 0:
            behind = last - (end - num_kept)
            if not first < behind <= last:
                raise IndexError(
                    f"rows [{first}, {last}) of {end} tokens cannot write a state after {num_kept}"
                )
            pieces = [*_pieces(first, behind, num_kept, table, metadata.block_size, num_blocks)]
            yield from pieces
            if behind < last:
                yield StatePiece(behind, last, pieces[-1].target, 0)


def _pieces(
    first: int, last: int, end: int, table: list[int], block_size: int, num_blocks: int
) -> Iterator[StatePiece]:
    start, source, offset = end - (last - first), 0, last - end
    if start > 0:
        source = _checked(table[(start - 1) // block_size], num_blocks)
    for index in range(start // block_size, (end - 1) // block_size + 1):
        behind = min((index + 1) * block_size, end)
        if table[index] or behind == end:
            target = _checked(table[index], num_blocks)
            yield StatePiece(first, behind + offset, source, target)
            first, source = behind + offset, target


def _checked(block: int, num_blocks: int) -> int:
    if not 0 < block < num_blocks:
        raise IndexError(f"block {block} is no place for a state in a cache of {num_blocks} blocks")
    return block


def state_before(states: Tensor, piece: StatePiece) -> Tensor:
    """Return a copy of the state, of `states` [blocks, ...], from which a piece starts."""
    source = states[piece.source]
    return source.clone() if piece.source else source.new_zeros(source.shape)


def leave_state(states: Tensor, piece: StatePiece, state: Tensor) -> None:
    """Write the state after a piece to its block in `states` [blocks, ...], if it has one."""
    if piece.target:
        states[piece.target] = state


_LEAST_SQUARE = 1e-6
"""Added to the squared length of a key or a query."""


def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    /,
    strongest: float = 1.0,
    least: float | None = None,
) -> Tensor:
    """Gated delta rule (S. Yang et al., 2024, arXiv:2412.06464): [T, Hv, Dv] of qkv's dtype, in float32.

    qkv [T, 2 * Hk * Dk + Hv * Dv] has the queries of all heads, their keys, then values; each of Hk key heads serves Hv
    / Hk value heads. ba [T, Hv + Hv * N] of its dtype: the logits of the write strengths (sigmoid, times `strongest`),
    then N time steps of each head; rates [Hv] below 0 and dt_bias [Hv * N] float32. Queries and keys are normalized to
    unit vectors, q = q / sqrt(Dk). For each value head and token the state S [Hv, Dk, Dv] becomes S * exp(rate *
    softplus(step + dt_bias)), then S + k (v - S^T k)^T * strength, and the result is S^T q.

    With one step per head, S decays uniformly; with Dk of them each of its rows does (Kimi Delta Attention, 2025,
    arXiv:2510.26692). Strengths above 1 give the state negative eigenvalues (Grazzi et al., 2024, arXiv:2411.12537).
    With `least`, below 0, S is multiplied by exp(least * sigmoid(-rate * (step + dt_bias))) instead.
    """
    q, k, v = _parts(qkv, states)
    strength, steps = torch.split_with_sizes(ba.float(), (len(rates), len(dt_bias)), 1)
    steps, rate = torch.unflatten(steps + dt_bias, 1, (len(rates), -1)), rates.unsqueeze(1)
    decay = (rate * F.softplus(steps) if least is None else least * (-rate * steps).sigmoid()).exp()
    strength = strongest * strength.sigmoid()
    out = torch.zeros_like(v)
    for piece in state_pieces(metadata, len(states)):
        state = state_before(states, piece)
        for row in range(piece.first, piece.last):
            state = state * decay[row].unsqueeze(-1)
            known = (k[row].unsqueeze(-1) * state).sum(1)
            change = (v[row] - known) * strength[row].unsqueeze(-1)
            state = state + k[row].unsqueeze(-1) * change.unsqueeze(1)
            out[row] = (q[row].unsqueeze(-1) * state).sum(1)
        leave_state(states, piece, state)
    return out.to(qkv.dtype)


def _parts(qkv: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k of unit length [T, Hv, Dk], q divided by the root of Dk, and v [T, Hv, Dv]."""
    _, heads, keys, values = states.shape
    of_keys = (qkv.shape[1] - heads * values) // 2
    q, k, v = torch.split_with_sizes(qkv.float(), (of_keys, of_keys, heads * values), 1)
    q, k = (_unit(torch.unflatten(part, 1, (-1, keys))) for part in (q, k))
    repeats = heads * keys // of_keys
    q, k = (part.repeat_interleave(repeats, 1) for part in (q * keys**-0.5, k))
    return q, k, torch.unflatten(v, 1, (heads, values))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LEAST_SQUARE).rsqrt()


def rg_lru(
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata, /
) -> Tensor:
    """Real-gated linear recurrent units (S. De et al., 2024, arXiv:2402.19427): x [T, h * D] -> the same shape and
    dtype.

    Each head computes its gates from its channels: weights [h, D, 2 * D] and bias [h, 2 * D] give, through a sigmoid, i
    and r of each channel. With a = exp(rate * r), rates [h * D] below 0, in float32, the state [h * D], which is the
    result, becomes a * state + sqrt(1 - a^2) * i * x; at the first token of a request, i * x. All but x is float32.
    """
    heads, size, _ = weights.shape
    gates = torch.einsum("thd,hde->the", torch.unflatten(x.float(), 1, (heads, size)), weights) + bias
    into, decaying = (gate.flatten(1).sigmoid() for gate in gates.chunk(2, -1))
    inputs, log_decay = into * x.float(), rates * decaying
    decay, scale = log_decay.exp(), (1 - (2 * log_decay).exp()).sqrt()
    out = torch.zeros_like(inputs)
    for piece in state_pieces(metadata, len(states)):
        state = state_before(states, piece)
        for row in range(piece.first, piece.last):
            begins = piece.source == 0 and row == piece.first
            state = inputs[row] if begins else decay[row] * state + scale[row] * inputs[row]
            out[row] = state
        leave_state(states, piece, state)
    return out.to(x.dtype)


_SLOWEST = -0.6065306597126334
"""-exp(-1/2): the logarithm of a decay is this, times a number in (0, 1)."""


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    of_heads: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    /,
    eps: float,
) -> Tensor:
    """RWKV-7's heads (B. Peng et al., 2025, arXiv:2503.14456): r, w, k, v, a [T, h * D] -> [T, h * D] of their dtype.

    In float32, for each head and token: with i = sigmoid(a), u = k * of_heads[0] normalized to unit length, and k = k *
    (1 + (i - 1) * of_heads[1]), the state S [h, D, D] becomes exp(-exp(-1/2) * sigmoid(w)) S, by rows, - (u * i) (S^T
    u)^T + k v^T, where S on the right is the previous state in both terms. The result is the layer norm of S^T r, with
    eps, times of_heads[3], plus of_heads[4], plus v times the sum of r * k * of_heads[2]. of_heads [5, h * D] float32.
    """
    _, heads, size, _ = states.shape

    def by_heads(x: Tensor) -> Tensor:
        return torch.unflatten(x.float(), -1, (heads, size))

    asked, keys, values, rate = by_heads(r), by_heads(k), by_heads(v), by_heads(a).sigmoid()
    unit_of, rate_of, bonus_of, weight, bias = by_heads(of_heads)
    decay = (_SLOWEST * by_heads(w).sigmoid()).exp()
    unit = F.normalize(keys * unit_of, dim=-1)
    keys = keys * (1 + (rate - 1) * rate_of)
    out = torch.zeros_like(values)
    for piece in state_pieces(metadata, len(states)):
        state = state_before(states, piece)
        for row in range(piece.first, piece.last):
            known = (unit[row].unsqueeze(-1) * state).sum(1, keepdim=True)
            state = (
                state * decay[row].unsqueeze(-1)
                - (unit[row] * rate[row]).unsqueeze(-1) * known
                + keys[row].unsqueeze(-1) * values[row].unsqueeze(1)
            )
            said = (asked[row].unsqueeze(-1) * state).sum(1)
            bonus = (asked[row] * keys[row] * bonus_of).sum(-1, keepdim=True) * values[row]
            out[row] = F.layer_norm(said, (size,), eps=eps) * weight + bias + bonus
        leave_state(states, piece, state)
    return out.flatten(1).to(r.dtype)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
    silu: bool = False,
) -> Tensor:
    """Depthwise causal convolution, optionally followed by silu: x [T, C] -> a new [T, C] of x's dtype.

    out[t] = bias + sum over k of weight[k] * x[t - K + 1 + k], with weight [K, C] and bias [C]. A state is the last K -
    1 inputs, the oldest first: states [num_blocks, K - 1, C].
    """
    out, wide = torch.zeros(x.shape, dtype=torch.float32, device=x.device), x.float()
    taps = len(weight)
    for piece in state_pieces(metadata, len(states)):
        inputs = torch.cat([state_before(states, piece), wide[piece.first : piece.last]])
        windows = inputs.unfold(0, taps, 1)  # [rows, C, taps]
        out[piece.first : piece.last] = (windows * weight.float().T).sum(-1) + (0 if bias is None else bias)
        if silu:
            out[piece.first : piece.last] = F.silu(out[piece.first : piece.last])
        leave_state(states, piece, inputs[len(inputs) - taps + 1 :])
    return out.to(x.dtype)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
) -> Tensor:
    """Mamba's recurrence (Gu and Dao, 2023, arXiv:2312.00752): x, dt [T, C] -> a new [T, C] of x's dtype.

    With d = softplus(dt[t]): s = exp(d * a) * s + b[t] * (d * x[t]); out[t] = sum over N of c[t] * s + skip * x[t],
    times silu(gate[t]) if there is a gate [T, C]. a [N, C], skip [C], b and c [T, N], states [num_blocks, N, C].
    """
    wide, times = x.float(), F.softplus(dt.float())
    into, outof = b.float()[:, :, None], c.float()[:, :, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for piece in state_pieces(metadata, len(states)):
        state = state_before(states, piece)
        for row in range(piece.first, piece.last):
            state = (times[row] * a).exp() * state + into[row] * (times[row] * wide[row])
            out[row] = (state * outof[row]).sum(0) + skip * wide[row]
        leave_state(states, piece, state)
    return _gated(out, gate).to(x.dtype)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
    groups: int = 1,
    time_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Mamba 2's recurrence (Dao and Gu, 2024, arXiv:2405.21060): x [T, H * D] -> a new [T, H * D] of x's dtype.

    For each of H heads of size D, which share b and c [T, G * N] in G groups: with d = softplus(dt[t] + dt_bias),
    clamped to the limits, s = exp(d * a) * s + b[t] * (d * x[t]) and out[t] = sum over N of c[t] * s + skip * x[t],
    times silu(gate[t]) if there is a gate [T, H * D]. dt [T, H]; a, skip and dt_bias [H]; states [num_blocks, H, N, D].
    """
    heads, count, size = states.shape[1:]
    wide = x.float().view(-1, heads, 1, size)
    times = F.softplus(dt.float() + dt_bias).clamp(*time_limits)[..., None, None]
    into, outof = (
        part.float().view(-1, groups, count, 1).repeat_interleave(heads // groups, 1) for part in (b, c)
    )
    out = torch.zeros(len(x), heads, size, dtype=torch.float32, device=x.device)
    for piece in state_pieces(metadata, len(states)):
        state = state_before(states, piece)
        for row in range(piece.first, piece.last):
            state = (times[row] * a[:, None, None]).exp() * state + into[row] * (times[row] * wide[row])
            out[row] = (state * outof[row]).sum(1) + skip[:, None] * wide[row, :, 0]
        leave_state(states, piece, state)
    return _gated(out.flatten(1), gate).to(x.dtype)


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    return out if gate is None else out * F.silu(gate.float())
