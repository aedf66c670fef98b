# SPDX-License-Identifier: Apache-2.0
"""Encoder of a Universal Speech Model (Zhang et al., 2023, arXiv:2303.01037), as Gemma 3n and Gemma 4 have it.

Two convolutions join frames to rows, and Conformer blocks (Gulati et al., 2020, arXiv:2005.08100) follow, whose rows
attend to a few rows before them, by their distance (Dai et al., 2019, arXiv:1901.02860). The two differ in this:

| | Gemma 3n | Gemma 4 |
|---|---|---|
| a convolution's row sees | frames from its own on | frames on both sides |
| norm of a convolution | over all frames so far | over a position's channels |
| a row attends to | `attention_context_left` rows, itself included | one fewer |
| keys | as they are | scaled |
| linear layers of a block | plain | with bounds on inputs and outputs |
| what follows | every fourth row; a learned embedding behind them | a linear layer |

Shapes: F frames of B bands, K and C channels before and after a layer, T rows, h heads of size D, W rows that a row
attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.norm import LayerNorm, RMSNorm
from quire.models.json_object import JsonObject
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.towers.base import NO_STEP, Arrays, LearnedTable, PatchLinear, Rows, Tower, by_rows

_SLOWEST = 1e4  # Of the sines' wavelengths over 2 pi.
_COLLECTING = 4  # Time of a convolution with what it copies, by that of the matmul.
_WIDER = 4  # Inner size of a feed-forward module by the outer one.


@dataclass(frozen=True)
class PartNames:
    """Names of a block's parts in the checkpoint, relative to the block."""

    first: str
    last: str
    attention: str
    relative: str
    post: str
    norm_before: str
    norm_after: str
    norm: str
    convolution: str = "lconv1d"


@dataclass(frozen=True)
class ConformerShape:
    """Sizes and options of the blocks.

    Args:
        taps: rows of the depthwise convolution, the row itself and those before it.
        reach: rows to which a row attends, itself and those before it.
        cap: soft cap of scores.
        limit: largest magnitude of some activations.
        residual_weight: factor of a feed-forward module's output.
        eps: of the norms around the depthwise convolution; others have 1e-6.
        key_scale: factor of keys.
        activate: activation of feed-forward modules and behind the depthwise convolution.
        make: returns a linear layer of a block by inputs, outputs and name, to be called with rows alone.
    """

    channels: int
    heads: int
    taps: int
    reach: int
    cap: float
    limit: float
    residual_weight: float
    eps: float
    key_scale: float
    activate: Callable[[Tensor], Tensor]
    make: Callable[[int, int, str], Module]
    names: PartNames

    def limited(self, x: Tensor) -> Tensor:
        """Return x within the limit, or within what its dtype can hold."""
        limit = min(self.limit, torch.finfo(x.dtype).max)
        return x.clamp(-limit, limit)


def sizes_of(options: JsonObject, usual_size: int, heads_key: str) -> tuple[int, int]:
    """Return the channels and heads of an encoder; raises UnsupportedModelError if the heads have no whole size."""
    channels, heads = options.integer("hidden_size", usual_size), options.integer(heads_key, 8)
    if channels % heads or channels % 2:
        raise options.unsupported("hidden_size", f"even, and a multiple of {heads_key} ({heads})")
    return channels, heads


class PlainLinear(Module):
    """Linear layer without bias that is called with rows alone."""

    def __init__(self, tower: Tower, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.linear = tower.linear(inputs, outputs, False, name)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, C]."""
        out: Tensor = self.linear(x, NO_STEP)
        return out


def _norm(tower: Tower, size: int, name: str, eps: float = 1e-6) -> RMSNorm:
    return RMSNorm(size=size, eps=eps, dtype=activation_dtype(tower.config), name=name)


class CumulativeNorm(Module):
    """`(x - mean) / std * weight` over all channels and bands of a frame and of those before it."""

    def __init__(self, tower: Tower, channels: int, eps: float, name: str) -> None:
        super().__init__()
        self.table = LearnedTable(channels, config=tower.config, name=name, suffix=".weight")
        self.eps = eps

    def slices(self, x: Tensor) -> Rows:
        """Compute x [F, B, C] -> the same shape."""
        wide = x.float()
        counts = torch.arange(1, len(x) + 1, device=x.device) * float(x[0].numel())
        centered = wide - _so_far(wide, counts)
        yield
        scale = torch.rsqrt(_so_far(centered.square(), counts) + self.eps)
        yield
        return (centered * scale * self.table.weight.float()).to(x.dtype)


def _so_far(x: Tensor, counts: Tensor) -> Tensor:
    """Return the mean [F, 1, 1] of x [F, B, C] over each frame and those before it."""
    return (x.flatten(1).sum(1).cumsum(0) / counts)[:, None, None]


class ChannelNorm(Module):
    """LayerNorm without bias over the channels of each position."""

    def __init__(self, tower: Tower, channels: int, eps: float, name: str) -> None:
        super().__init__()
        dtype = activation_dtype(tower.config)
        self.norm = LayerNorm(size=channels, eps=eps, dtype=dtype, has_bias=False, name=name)

    def slices(self, x: Tensor) -> Rows:
        """Compute x [F, B, C] -> the same shape."""
        out: Tensor = self.norm(x.flatten(0, 1)).view(x.shape)
        yield
        return out


class ChannelsLastLinear(PatchLinear):
    """`PatchLinear` whose rows have the channels of a position side by side, which are quicker to collect."""

    @property
    def rearranges(self) -> bool:
        return True

    def rearranged(self, weight: Tensor) -> Tensor:
        return weight.view(len(weight), self.patch[0], -1).transpose(1, 2).flatten(1).contiguous()


class Convolution(Module):
    """Convolution over frames and bands, a norm and ReLU.

    Bands are padded by one on each side, frames by `before` and so that `kernel` rows come of the last one.
    """

    def __init__(
        self,
        tower: Tower,
        channels: tuple[int, int],
        norm: CumulativeNorm | ChannelNorm,
        at: str,
        *,
        kernel: tuple[int, int] = (3, 3),
        stride: tuple[int, int] = (2, 2),
        before: int,
    ) -> None:
        super().__init__()
        inputs, self.channels = channels
        self.kernel, self.stride = kernel, stride
        self.padding = (0, 0, 1, 1, before, kernel[0] - 1 - before)
        self.norm = norm
        self.conv = ChannelsLastLinear(
            patch=(inputs, *kernel), outputs=self.channels, bias=False, dtype=tower.dtype, name=f"{at}.conv"
        )

    def bands(self, bands: int) -> int:
        """Return the bands of the output."""
        return (bands + 2 - self.kernel[1]) // self.stride[1] + 1

    def slices(self, x: Tensor) -> Rows:
        """Compute x [F', B', K] -> [F, B, C]."""
        padded = F.pad(x, self.padding)
        for axis in (0, 1):
            padded = padded.unfold(axis, self.kernel[axis], self.stride[axis])
        windows = padded.permute(0, 1, 3, 4, 2)  # [F, B, kernel, K]
        num_bands, size = windows.shape[1], windows[0, 0].numel()

        def convolved(rows: Tensor) -> Tensor:
            out: Tensor = self.conv(rows.reshape(-1, size), NO_STEP)
            return out.view(len(rows), num_bands, self.channels)

        found = yield from by_rows(convolved, windows, _COLLECTING * 2.0 * num_bands * size * self.channels)
        normed = yield from self.norm.slices(found)
        return ops.activate(normed, "relu")


class FeedForward(Module):
    """`x + residual_weight * norm(down(activate(up(norm(x)))))`."""

    def __init__(self, tower: Tower, shape: ConformerShape, at: str) -> None:
        super().__init__()
        size = shape.channels
        self.shape = shape
        self.up = shape.make(size, _WIDER * size, f"{at}.ffw_layer_1")
        self.down = shape.make(_WIDER * size, size, f"{at}.ffw_layer_2")
        self.norm_before, self.norm_after = (
            _norm(tower, size, f"{at}.{each}_layer_norm") for each in ("pre", "post")
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, C] -> the same shape."""
        shape = self.shape
        y = self.down(shape.activate(self.up(self.norm_before(shape.limited(x)))))
        out: Tensor = x + self.norm_after(shape.limited(y)) * shape.residual_weight
        return out

    def slices(self, x: Tensor) -> Rows:
        return by_rows(self.forward, x, 4.0 * _WIDER * self.shape.channels**2)


class LocalAttention(Module):
    """Attention of a row to itself and to a few rows before it: `q.(k + r)`, r by the distance of the two."""

    def __init__(self, tower: Tower, shape: ConformerShape, at: str) -> None:
        super().__init__()
        size, names = shape.channels, shape.names
        self.shape, self.head_dim = shape, size // shape.heads
        self.scale = self.head_dim**-0.5 / math.log(2)
        self.qkv = nn.ModuleList(
            shape.make(size, size, f"{at}.{names.attention}.{each}_proj") for each in "qkv"
        )
        self.scales = LearnedTable(
            self.head_dim, config=tower.config, name=f"{at}.{names.attention}.per_dim_scale"
        )
        self.relative = PlainLinear(tower, size, size, f"{at}.{names.relative}")
        self.post = shape.make(size, size, f"{at}.{names.post}")
        self.norm_before = _norm(tower, size, f"{at}.{names.norm_before}")
        self.norm_after = _norm(tower, size, f"{at}.{names.norm_after}")

    def slices(self, x: Tensor, distances: Tensor) -> Rows:
        """Compute x [T, C] and sines of distances [W, C] -> [T, C]."""
        size = self.shape.channels
        heads = yield from by_rows(self._heads, x, 6.0 * size**2)
        relative = self.relative(distances).view(len(distances), -1, self.head_dim).float()
        weights = self._weights(heads[:, 0], heads[:, 1], relative)
        yield
        values = _behind(heads[:, 2], len(distances))
        attended = sum(weights[..., away, None] * values(away) for away in range(len(distances)))
        assert isinstance(attended, Tensor)
        yield
        both = torch.cat((x, attended.flatten(1).to(x.dtype)), 1)
        return (yield from by_rows(self._out, both, 2.0 * size**2))

    def _heads(self, x: Tensor) -> Tensor:
        """x [T, C] -> scaled queries and keys, and values, float32 [T, 3, h, D]."""
        normed = self.norm_before(self.shape.limited(x))
        q, k, v = (
            linear(normed).float().view(len(x), self.shape.heads, self.head_dim) for linear in self.qkv
        )
        scales = self.scale * F.softplus(self.scales.weight.float())
        return torch.stack((q * scales, k * self.shape.key_scale, v), 1)

    def _weights(self, q: Tensor, k: Tensor, relative: Tensor) -> Tensor:
        """Return what each row takes of itself and of those before it, [T, h, W]."""
        keys, cap = _behind(k, len(relative)), self.shape.cap
        scores = torch.stack([(q * (keys(away) + row)).sum(-1) for away, row in enumerate(relative)], -1)
        scores = ops.activate(scores / cap, "tanh") * cap
        rows, away = (torch.arange(size, device=q.device) for size in (len(q), len(relative)))
        return scores.masked_fill((away > rows[:, None])[:, None], -torch.inf).softmax(-1)

    def _out(self, both: Tensor) -> Tensor:
        x, attended = both.chunk(2, 1)
        out: Tensor = x + self.norm_after(self.shape.limited(self.post(attended.contiguous())))
        return out


def _behind(x: Tensor, reach: int) -> Callable[[int], Tensor]:
    """Return a function by which a row of [T, ...] is that so many rows before it, or 0."""
    padded = F.pad(x, (0, 0, 0, 0, reach - 1, 0))
    return lambda away: padded[reach - 1 - away : reach - 1 - away + len(x)]


class LightConvolution(Module):
    """Gate, depthwise convolution over a row and those before it, and a linear layer, added to the input."""

    def __init__(self, tower: Tower, shape: ConformerShape, at: str) -> None:
        super().__init__()
        size = shape.channels
        self.shape = shape
        self.start = shape.make(size, 2 * size, f"{at}.linear_start")
        self.end = shape.make(size, size, f"{at}.linear_end")
        self.norm_before = _norm(tower, size, f"{at}.pre_layer_norm", shape.eps)
        self.norm_after = _norm(tower, size, f"{at}.conv_norm", shape.eps)
        self.taps = LearnedTable(
            size,
            shape.taps,
            config=tower.config,
            name=f"{at}.depthwise_conv1d",
            suffix=".weight",
            stored=(size, 1, shape.taps),
        )

    def slices(self, x: Tensor) -> Rows:
        """Compute x [T, C] -> the same shape."""
        size = self.shape.channels
        gated = yield from by_rows(self._gated, x, 4.0 * size**2)
        mixed = self._mixed(gated)
        yield
        added = yield from by_rows(self.end, mixed, 2.0 * size**2)
        return x + added

    def _gated(self, x: Tensor) -> Tensor:
        found: Tensor = self.start(self.norm_before(x))
        values, gate = found.chunk(2, 1)
        return values * ops.activate(gate, "sigmoid")

    def _mixed(self, x: Tensor) -> Tensor:
        last = self.shape.taps - 1
        padded, out = F.pad(x, (0, 0, last, 0)), x * self.taps.weight[:, last]
        for tap in range(last):
            out = out + padded[tap : tap + len(x)] * self.taps.weight[:, tap]
        return self.shape.activate(self.norm_after(self.shape.limited(out)))


class ConformerBlock(Module):
    """Half a feed-forward module, attention, a convolution, the other half, and a norm."""

    def __init__(self, tower: Tower, shape: ConformerShape, at: str) -> None:
        super().__init__()
        names = shape.names
        self.shape = shape
        self.first, self.last = (
            FeedForward(tower, shape, f"{at}.{each}") for each in (names.first, names.last)
        )
        self.attention = LocalAttention(tower, shape, at)
        self.convolution = LightConvolution(tower, shape, f"{at}.{names.convolution}")
        self.norm = _norm(tower, shape.channels, f"{at}.{names.norm}")

    def slices(self, x: Tensor, distances: Tensor) -> Rows:
        """Compute x [T, C] and sines of distances [W, C] -> [T, C]."""
        x = yield from self.first.slices(x)
        x = yield from self.attention.slices(x, distances)
        x = yield from self.convolution.slices(x)
        x = yield from self.last.slices(x)
        out: Tensor = self.norm(self.shape.limited(x))
        return out


class UsmEncoder(Module):
    """Convolutions, a linear layer and blocks."""

    def __init__(
        self,
        tower: Tower,
        shape: ConformerShape,
        convolutions: Sequence[Convolution],
        bands: int,
        blocks: Sequence[str],
        projection: str,
    ) -> None:
        super().__init__()
        self.shape, self.bands = shape, bands
        self.convolutions = nn.ModuleList(convolutions)
        for convolution in convolutions:
            bands = convolution.bands(bands)
        inputs = bands * convolutions[-1].channels
        self.projection = PlainLinear(tower, inputs, shape.channels, projection)
        self.blocks = nn.ModuleList(ConformerBlock(tower, shape, at) for at in blocks)

    def slices(self, features: Tensor) -> Rows:
        """Compute a spectrogram [F, B] -> rows [T, C]."""
        x = features[..., None]
        for convolution in self.convolutions:
            assert isinstance(convolution, Convolution)
            x = yield from convolution.slices(x)
        x = yield from by_rows(self.projection, x.flatten(1), 2.0 * x[0].numel() * self.shape.channels)
        distances = self._distances(x)
        for block in self.blocks:
            assert isinstance(block, ConformerBlock)
            x = yield from block.slices(x, distances)
        return x

    def _distances(self, like: Tensor) -> Tensor:
        """Return sines and then cosines [W, C] of the distances 0 to W - 1."""
        count = self.shape.channels // 2
        step = math.log(_SLOWEST) / max(count - 1, 1)
        frequencies = torch.exp(torch.arange(count, device=like.device) * -step)
        angles = torch.arange(self.shape.reach, device=like.device)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), 1).to(like.dtype)

    def features(self, tower: Tower, arrays: Arrays) -> Tensor:
        """Return the spectrogram [F, B] of a sound; raises ValidationError if it is of another shape."""
        given = arrays[FEATURES]
        if given.ndim != 3 or given.shape[0] != 1 or not given.shape[1] or given.shape[2] != self.bands:
            raise ValidationError(f"a spectrogram must be [1, F, {self.bands}], got {list(given.shape)}")
        return tower.to_device(given[0])
