# SPDX-License-Identifier: Apache-2.0
"""Encoder of images of Gemma 3n (Google, 2025): MobileNet-v5, of the blocks of MobileNet-v4 (Qin et al., 2024,
arXiv:2404.10518).

Four stages of convolutions and multi-query attention halve the sides of an image; the last two are joined.

Shapes: an image of H x W positions with K channels before and C channels after a layer, n = H * W positions, m of keys.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.activation import PLAIN
from quire.layers.base import Module, activation_dtype
from quire.layers.norm import RMSNorm
from quire.multimodal.towers.base import (
    NO_STEP,
    LearnedTable,
    PatchLinear,
    Rows,
    Tower,
    by_rows,
    chunks,
    sequences,
)

_EPS = 1e-6
_STEM, _JOINED_BY = 64, 2
_GELU = PLAIN["gelu_pytorch_tanh"]
Picture = Generator[None, None, Tensor]
"""Computation in slices, which returns positions [H, W, C]."""


@dataclass(frozen=True)
class Edge:
    """Block of a whole convolution that widens and a linear layer that narrows."""

    stride: int
    widening: int
    channels: int
    kernel: int = 3


@dataclass(frozen=True)
class Inverted:
    """Universal inverted bottleneck; a kernel of 0 stands for no depthwise convolution."""

    before: int
    between: int
    stride: int
    widening: int
    channels: int


@dataclass(frozen=True)
class Attending:
    """Multi-query attention, with keys and values at every `stride`-th position."""

    heads: int
    head_dim: int
    stride: int
    channels: int


STAGES: tuple[tuple[Edge | Inverted | Attending, ...], ...] = (
    (Edge(2, 4, 128), Edge(1, 4, 128), Edge(1, 4, 128)),
    (Inverted(3, 5, 2, 6, 256), *(Inverted(each, 0, 1, 4, 256) for each in (5, 3, 5, 3))),
    (
        Inverted(5, 5, 2, 6, 640),
        *(Inverted(5, 0, 1, 4, 640),) * 7,
        Inverted(0, 0, 1, 1, 640),
        *(Attending(12, 64, 2, 640), Inverted(0, 0, 1, 2, 640)) * 14,
    ),
    (Inverted(5, 5, 2, 6, 1280), *(Attending(16, 96, 1, 1280), Inverted(0, 0, 1, 2, 1280)) * 19),
)
"""Blocks of each stage of the encoder with 300 million parameters, the only one in use."""


def _norm(tower: Tower, size: int, name: str) -> RMSNorm:
    return RMSNorm(size=size, eps=_EPS, dtype=activation_dtype(tower.config), name=name)


def _padded(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Return x [H, W, C] with zeros around, so that each `stride`-th position is the middle of a window."""
    missing = [max((math.ceil(side / stride) - 1) * stride + kernel - side, 0) for side in x.shape[:2]]
    (top, bottom), (left, right) = ((each // 2, each - each // 2) for each in missing)
    return F.pad(x, (0, 0, left, right, top, bottom))


class WholeConvolution(Module):
    """Convolution over all channels, norm and GELU."""

    def __init__(
        self,
        tower: Tower,
        inputs: int,
        outputs: int,
        names: tuple[str, str],
        *,
        kernel: int,
        stride: int,
        bias: bool,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.outputs = kernel, stride, outputs
        self.conv = PatchLinear(
            patch=(inputs, kernel, kernel), outputs=outputs, bias=bias, dtype=tower.dtype, name=names[0]
        )
        self.norm = _norm(tower, outputs, names[1])

    def slices(self, x: Tensor) -> Picture:
        """Compute x [H', W', K] -> [H, W, C]."""
        windows = _padded(x, self.kernel, self.stride)
        for axis in (0, 1):
            windows = windows.unfold(axis, self.kernel, self.stride)
        rows, columns = windows.shape[:2]
        size = windows[0, 0].numel()
        out = x.new_empty(rows, columns, self.outputs)
        for part in chunks(rows, 2.0 * columns * size * self.outputs, least=1):
            found: Tensor = self.conv(windows[part].reshape(-1, size), NO_STEP)
            out[part] = _GELU(self.norm(found)).view(-1, columns, self.outputs)
            yield
        return out


class Pointwise(Module):
    """Linear layer over positions, which the checkpoint has as a convolution; a norm and GELU if they are wanted."""

    def __init__(
        self, tower: Tower, inputs: int, outputs: int, name: str, norm: str = "", *, activates: bool = False
    ) -> None:
        super().__init__()
        self.flops = 2.0 * inputs * outputs
        self.conv = PatchLinear(
            patch=(inputs, 1, 1), outputs=outputs, bias=False, dtype=tower.dtype, name=name
        )
        self.norm = _norm(tower, outputs, norm) if norm else None
        self.activates = activates

    def forward(self, x: Tensor) -> Tensor:
        """x [n, K] -> [n, C]."""
        found: Tensor = self.conv(x, NO_STEP)
        found = found if self.norm is None else self.norm(found)
        return _GELU(found) if self.activates else found


class NormedDepthwise(Module):
    """Convolution of each channel by itself, and a norm."""

    def __init__(self, tower: Tower, size: int, kernel: int, stride: int, names: tuple[str, str]) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.taps = LearnedTable(
            size,
            kernel**2,
            config=tower.config,
            name=names[0],
            suffix=".weight",
            stored=(size, 1, kernel, kernel),
        )
        self.norm = _norm(tower, size, names[1])

    def forward(self, x: Tensor) -> Tensor:
        """x [H', W', C] -> [H, W, C]."""
        rows, columns = (math.ceil(side / self.stride) for side in x.shape[:2])
        padded, taps = _padded(x, self.kernel, self.stride).float(), self.taps.weight.float()
        out = padded.new_zeros(rows, columns, x.shape[2])
        for tap in range(self.kernel**2):
            down, across = divmod(tap, self.kernel)
            shifted = padded[down :: self.stride, across :: self.stride][:rows, :columns]
            out.addcmul_(shifted, taps[:, tap])
        normed: Tensor = self.norm(out.to(x.dtype).flatten(0, 1))
        return normed.view(out.shape)


class EdgeBlock(Module):
    """See `Edge`."""

    def __init__(self, tower: Tower, spec: Edge, inputs: int, at: str) -> None:
        super().__init__()
        wide = inputs * spec.widening
        self.is_sum = spec.stride == 1 and inputs == spec.channels
        names = (f"{at}.conv_exp", f"{at}.bn1")
        self.wide = WholeConvolution(
            tower, inputs, wide, names, kernel=spec.kernel, stride=spec.stride, bias=False
        )
        self.narrow = Pointwise(tower, wide, spec.channels, f"{at}.conv_pwl", f"{at}.bn2")

    def slices(self, x: Tensor) -> Picture:
        """Compute x [H', W', K] -> [H, W, C]."""
        wide = yield from self.wide.slices(x)
        found = yield from by_rows(self.narrow, wide.flatten(0, 1), self.narrow.flops)
        found = found.view(*wide.shape[:2], -1)
        return x + found if self.is_sum else found


class InvertedBlock(Module):
    """See `Inverted`; without `scales` its output is not scaled per channel, and not added to the input."""

    def __init__(self, tower: Tower, spec: Inverted, inputs: int, at: str, *, scales: bool = True) -> None:
        super().__init__()
        wide, size = inputs * spec.widening, spec.channels
        self.is_sum = scales and spec.stride == 1 and inputs == size
        self.before = self.between = None
        if spec.before:
            stride = 1 if spec.between else spec.stride
            names = (f"{at}.dw_start.conv", f"{at}.dw_start.bn")
            self.before = NormedDepthwise(tower, inputs, spec.before, stride, names)
        if spec.between:
            names = (f"{at}.dw_mid.conv", f"{at}.dw_mid.bn")
            self.between = NormedDepthwise(tower, wide, spec.between, spec.stride, names)
        self.wide, self.narrow = (
            Pointwise(tower, *sizes, f"{at}.{name}.conv", f"{at}.{name}.bn", activates=name == "pw_exp")
            for name, sizes in (("pw_exp", (inputs, wide)), ("pw_proj", (wide, size)))
        )
        self.scale = (
            LearnedTable(size, config=tower.config, name=f"{at}.layer_scale", suffix=".gamma")
            if scales
            else None
        )

    def slices(self, x: Tensor) -> Picture:
        """Compute x [H', W', K] -> [H, W, C]."""
        start = x if self.before is None else self.before(x)
        yield
        shape, rows = start.shape[:2], start.flatten(0, 1)
        if self.between is None:
            flops = self.wide.flops + self.narrow.flops
            found = yield from by_rows(lambda part: self._narrowed(self.wide(part)), rows, flops)
        else:
            wide = yield from by_rows(self.wide, rows, self.wide.flops)
            middle = _GELU(self.between(wide.view(*shape, -1)))
            yield
            shape = middle.shape[:2]
            found = yield from by_rows(self._narrowed, middle.flatten(0, 1), self.narrow.flops)
        found = found.view(*shape, -1)
        return x + found if self.is_sum else found

    def _narrowed(self, x: Tensor) -> Tensor:
        found: Tensor = self.narrow(x)
        return found if self.scale is None else found * self.scale.weight


class AttendingBlock(Module):
    """See `Attending`.

    No score depends on a position, so queries behind the first m stand beside these as further heads: the kernel has as
    many rows as keys.
    """

    def __init__(self, tower: Tower, spec: Attending, inputs: int, at: str) -> None:
        super().__init__()
        self.spec = spec
        self.norm = _norm(tower, inputs, f"{at}.norm")
        wide, size = spec.heads * spec.head_dim, spec.head_dim
        self.query = Pointwise(tower, inputs, wide, f"{at}.attn.query.proj")
        self.key, self.value = (
            Pointwise(tower, inputs, size, f"{at}.attn.{name}.proj") for name in ("key", "value")
        )
        self.downs: nn.ModuleList | None = None
        if spec.stride > 1:
            self.downs = nn.ModuleList(
                NormedDepthwise(tower, inputs, 3, spec.stride, (f"{each}.down_conv", f"{each}.norm"))
                for each in (f"{at}.attn.key", f"{at}.attn.value")
            )
        self.out = Pointwise(tower, wide, spec.channels, f"{at}.attn.output.proj")
        self.scale = LearnedTable(
            spec.channels, config=tower.config, name=f"{at}.layer_scale", suffix=".gamma"
        )

    def slices(self, x: Tensor) -> Picture:
        """Compute x [H, W, C] -> the same shape."""
        spec, rows = self.spec, x.flatten(0, 1)
        normed: Tensor = self.norm(rows)
        queries = yield from by_rows(self.query, normed, self.query.flops)
        k, v = (
            project(normed if self.downs is None else self.downs[index](normed.view(x.shape)).flatten(0, 1))[
                :, None
            ]
            for index, project in enumerate((self.key, self.value))
        )
        yield
        times, odd = divmod(len(rows), len(k))
        if odd:
            raise ValidationError(
                f"an image has {x.shape[0]} x {x.shape[1]} positions, which keys do not divide"
            )
        q = queries.view(times, len(k), spec.heads, spec.head_dim).transpose(0, 1).flatten(1, 2)
        attended, metadata = torch.empty_like(q), sequences([len(k)], x.device)
        for own in chunks(q.shape[1], 4.0 * len(k) ** 2 * spec.head_dim, least=1):
            attended[:, own] = ops.bidirectional_attention(q[:, own], k, v, metadata, spec.head_dim**-0.5)
            yield
        back = attended.view(len(k), times, spec.heads, spec.head_dim).transpose(0, 1).reshape(len(rows), -1)
        found = yield from by_rows(lambda part: self.out(part) * self.scale.weight, back, self.out.flops)
        return x + found.view(x.shape)


def _block(
    tower: Tower, spec: Edge | Inverted | Attending, inputs: int, at: str
) -> EdgeBlock | InvertedBlock | AttendingBlock:
    if isinstance(spec, Edge):
        return EdgeBlock(tower, spec, inputs, at)
    return (
        InvertedBlock(tower, spec, inputs, at)
        if isinstance(spec, Inverted)
        else AttendingBlock(tower, spec, inputs, at)
    )


class MobileNet(Module):
    """The encoder: an image to side x side rows.

    Args:
        size: channels of a row.
        side: rows along each side of the image.
    """

    def __init__(self, tower: Tower, size: int, side: int, at: str) -> None:
        super().__init__()
        self.side = side
        names = (f"{at}.conv_stem.conv", f"{at}.conv_stem.bn")
        self.stem = WholeConvolution(tower, 3, _STEM, names, kernel=3, stride=2, bias=True)
        self.stages, inputs = nn.ModuleList(), _STEM
        for number, specs in enumerate(STAGES):
            blocks = nn.ModuleList()
            for index, spec in enumerate(specs):
                blocks.append(_block(tower, spec, inputs, f"{at}.blocks.{number}.{index}"))
                inputs = spec.channels
            self.stages.append(blocks)
        joined = STAGES[-2][-1].channels + inputs
        spec = Inverted(0, 0, 1, _JOINED_BY, size)
        self.join = InvertedBlock(tower, spec, joined, f"{at}.msfa.ffn", scales=False)
        self.norm = _norm(tower, size, f"{at}.msfa.norm")

    def slices(self, pixels: Tensor) -> Rows:
        """Compute pixels [3, height, width] -> [side * side, size]."""
        x = yield from self.stem.slices(pixels.permute(1, 2, 0))
        found: list[Tensor] = []
        for blocks in self.stages:
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                assert isinstance(block, (EdgeBlock, InvertedBlock, AttendingBlock))
                x = yield from block.slices(x)
            found.append(x)
        finer = found[-2]
        times, odd = divmod(len(finer), len(x))
        span, rest = divmod(len(finer), self.side)
        if odd or rest or finer.shape[0] != finer.shape[1]:
            raise ValidationError(
                f"an image has {finer.shape[0]} x {finer.shape[1]} positions, no multiple of {self.side} x {self.side}"
            )
        coarser = x.repeat_interleave(times, 0).repeat_interleave(times, 1)
        joined = yield from self.join.slices(torch.cat((finer, coarser), -1))
        means = joined.float().view(self.side, span, self.side, span, -1).mean((1, 3)).to(joined.dtype)
        out: Tensor = self.norm(means.flatten(0, 1))
        return out
