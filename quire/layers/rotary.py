# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the ways to stretch it to longer contexts.

Shapes: P positions, T tokens, D head size, R rotated dimensions of each head (R <= D).
Invariant: the angles of a position are fixed when the model is built. transformers switches the frequencies of
`dynamic` and `longrope` with the longest sequence of the batch, so a result would depend on its neighbors. Here:

- `dynamic`: position p is rotated as in a sequence that ends at p. So up to `max_position_embeddings` nothing is
  scaled, and beyond it a token gets what transformers gives it when it generates token by token.
- `longrope`: the short factors if `max_model_len` fits the original context, else the long ones, for all positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config import EngineConfig, RopeScaling
from quire.errors import UnsupportedModelError
from quire.kernels import ops
from quire.layers.base import Module
from quire.layers.step import StepContext


class RotaryEmbedding(Module):
    """Rotation of q and k by position; one instance serves all layers that share a formula."""

    cos_sin_cache: Tensor
    axes: Tensor | None
    """[R] int64: which of a token's three positions turns each column; None: a token has one position."""

    def __init__(self, *, config: EngineConfig, rope: RopeScaling) -> None:
        super().__init__()
        # The table is computed at once, on the host, even while parameters are created on the meta device.
        with torch.device("cpu"):
            cache = cos_sin_table(config, rope)
            axes = axes_of_angles(config, cache.shape[1] // 2)
        self.register_buffer("cos_sin_cache", cache, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.interleaved = rope.interleaved

    def forward(self, positions: Tensor, q: Tensor, k: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """positions [T], q [T, Hq, D], k [T, Hkv, D], rotated in place."""
        places, table = self.angles(positions, step)
        return ops.rotary_embedding(places, q, k, table, self.interleaved)

    def queries(self, positions: Tensor, q: Tensor, step: StepContext) -> Tensor:
        """positions [T], q [T, Hq, D], rotated in place."""
        return self(positions, q, q[:, :0], step)[0]

    def angles(self, positions: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Return what kernels take: [T] rows, of a table like `cos_sin_cache`, for positions [T].

        With three positions per token, the table has a row for each token of the step. A token whose positions are
        equal has the row of that position, bit for bit.
        """
        if step.rope_positions is None or self.axes is None:
            return positions, self.cos_sin_cache
        table = self.cos_sin_cache.gather(0, step.rope_positions.index_select(0, self.axes).t())
        return torch.arange(len(table), device=table.device), table

    def places(self, positions: Tensor) -> Tensor:
        """Return the table rows for positions [T], which kernels take."""
        return positions


class Unrotated(Module):
    """Rotary embedding that rotates nothing, for kernels that always rotate: every token is at position 0."""

    cos_sin_cache: Tensor
    interleaved = False

    def __init__(self, rot_dim: int) -> None:
        super().__init__()
        cosines, sines = torch.ones(1, rot_dim // 2, device="cpu"), torch.zeros(1, rot_dim // 2, device="cpu")
        self.register_buffer("cos_sin_cache", torch.cat((cosines, sines), 1), persistent=False)

    def places(self, positions: Tensor) -> Tensor:
        """See `RotaryEmbedding.places`."""
        return torch.zeros_like(positions)


@dataclass(frozen=True)
class _Shape:
    rot_dim: int
    max_position: int
    max_len: int


def axes_of_angles(config: EngineConfig, num_angles: int) -> Tensor | None:
    """Return [2 * num_angles] int64: for cosines and then sines, which of a token's three positions counts; None if the
    model has one position per token (M-RoPE; Wang et al., 2024, arXiv:2409.12191).

    Sections of angles belong to frames, rows and columns, in this order; interleaved ones take turns from the first
    angle on, and frames have what is left.

    Raises:
        UnsupportedModelError: the sections are not as many as the angles.
    """
    whole = config.arch.part_of
    if whole is None or not whole.rope_sections:
        return None
    sections = whole.rope_sections
    if not whole.rope_interleaved:
        if sum(sections) != num_angles:
            raise UnsupportedModelError(
                f"mrope_section {list(sections)} must have {num_angles} angles together, half of those rotated"
            )
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    else:
        axes = torch.zeros(num_angles, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    return axes.repeat(2)


def cos_sin_table(config: EngineConfig, rope: RopeScaling) -> Tensor:
    """Return float32 [P, R]: the cosines and then the sines of every position's R / 2 angles."""
    arch = config.arch
    max_len = config.model.max_model_len or arch.max_position_embeddings
    shape = _Shape(rope.rotated(arch.head_dim), arch.max_position_embeddings, max_len)
    frequencies = _FREQUENCIES[rope.kind](rope, shape)
    angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * frequencies
    if rope.backwards:
        angles = -angles
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * _attention_scale(rope)


def _default(rope: RopeScaling, shape: _Shape) -> Tensor:
    return 1.0 / _powers(rope.theta, shape.rot_dim)


def _linear(rope: RopeScaling, shape: _Shape) -> Tensor:
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595)."""
    return _default(rope, shape) / rope.factor


def _proportional(rope: RopeScaling, shape: _Shape) -> Tensor:
    """Gemma 4: a head has as many pairs as if all turned, of which the first ones do."""
    frequencies = _linear(rope, shape)
    frequencies[int(rope.partial_rotary_factor * shape.rot_dim // 2) :] = 0.0
    return frequencies


def _dynamic(rope: RopeScaling, shape: _Shape) -> Tensor:
    """NTK-aware scaling: a longer sequence has a larger base; [P, R / 2]."""
    lengths = torch.arange(1, shape.max_len + 1, dtype=torch.float32).clamp(min=shape.max_position)
    stretch = rope.factor * lengths / shape.max_position - (rope.factor - 1)
    # With a single pair the frequency is 1 whatever the base, and the exponent would be undefined.
    exponent = shape.rot_dim / max(shape.rot_dim - 2, 1)
    return 1.0 / _powers((rope.theta * stretch**exponent).unsqueeze(1), shape.rot_dim)


def _llama3(rope: RopeScaling, shape: _Shape) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    frequencies = _default(rope, shape)
    turns = rope.original_max_position / (2 * math.pi / frequencies)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeScaling, shape: _Shape) -> Tensor:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): between `beta_slow` and `beta_fast` turns, a ramp over dimensions."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return shape.rot_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.rot_dim - 1)
    steps = torch.arange(shape.rot_dim // 2, dtype=torch.float32)
    slowed = ((steps - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    frequencies = _default(rope, shape)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def _longrope(rope: RopeScaling, shape: _Shape) -> Tensor:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): a searched divisor for each frequency."""
    divisors = rope.long_factor if shape.max_len > rope.original_max_position else rope.short_factor
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(rope.theta, shape.rot_dim))


# Frequencies [R / 2], or [P, R / 2] if they differ by position.
_FREQUENCIES: dict[str, Callable[[RopeScaling, _Shape], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _powers(theta: float | Tensor, rot_dim: int) -> Tensor:
    """Return theta ** (2 i / R) for i < R / 2, in the last dimension."""
    return theta ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim)


def _attention_scale(rope: RopeScaling) -> float:
    """Return the factor of cosines and sines, which scales the attention scores by its square."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope" and rope.factor > 1.0:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    return 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
