"""The torch oracles of the ops of layers with a state: a causal convolution, and the recurrences of Mamba and Mamba 2.

Invariant: as in `reference`; rows of no request come out as 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.reference_states import leave_state, state_before, state_pieces


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, metadata: StateMetadata, silu: bool
) -> Tensor:
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
) -> Tensor:
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
    groups: int,
    time_limits: tuple[float, float],
) -> Tensor:
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
