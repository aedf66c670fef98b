"""The torch oracles of recurrences over tokens.

Invariant: a token's result is made from the state before it in the same way whatever the chunk it comes in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.reference_states import leave_state, state_before, state_pieces

_LEAST_SQUARE = 1e-6
"""Added to the squared length of a key or a query."""


def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    strongest: float,
    least: float | None,
) -> Tensor:
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
    """q and k of unit length [T, Hv, Dk], q divided by the root of Dk, and v [T, Hv, Dv]."""
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
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata
) -> Tensor:
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
"""Minus e to the power of minus a half: the logarithm of a decay is this, times a number in (0, 1)."""


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    of_heads: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    eps: float,
) -> Tensor:
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
