# SPDX-License-Identifier: Apache-2.0
"""Sound encoder of Phi-4-multimodal (2025, arXiv:2503.01743): a Conformer (Gulati et al., 2020, arXiv:2005.08100).

Convolutions reduce a spectrogram's frames by eight. The rows are cut into chunks of 500, each computed alone; the last
of several is filled with zeros, which take part, as in transformers for one sound. A sound beside an image has a
projection of its own.

Shapes: T frames of B mel bins, n rows, C channels, h heads, K channels of the convolutions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ValidationError
from quire.kernels.attention_metadata import GroupMetadata
from quire.layers.activation import PLAIN
from quire.layers.base import Module
from quire.layers.linear import QKVLinear
from quire.models.json_object import JsonObject
from quire.multimodal.processors.base import BESIDE_IMAGES
from quire.multimodal.processors.phi4_sound import BINS, REDUCTION
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    by_rows,
    chunks,
    gated_by_second,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, SlicedBlock, tower_norm
from quire.worker.media_rows import Embeddings

CHUNK = 500
LEVELS = 3
_EPS = 1e-5
_KERNEL = 3
_USUAL: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_blocks": 24,
    "num_attention_heads": 16,
    "kernel_size": 3,
    "bias_max_distance": 1000,
    "nemo_conv_channels": 1024,
    "ext_pw_out_channel": 1024,
    "depthwise_separable_out_channel": 1024,
}
_RENAMED = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
}
"""Key of the authors' config -> transformers' key."""


@dataclass(frozen=True)
class SoundNames:
    """Names of tensors in which the two forms of checkpoints differ."""

    mlp: tuple[str, str] = ("gate_up_proj", "down_proj")
    qkv: str = "qkv_proj"
    out: str = "o_proj"
    speech: tuple[str, str] = ("up_proj_for_speech", "down_proj_for_speech")
    vision: tuple[str, str] = ("up_proj_for_vision_speech", "down_proj_for_vision_speech")


ORIGINAL_NAMES = SoundNames(
    mlp=("net.0.linear", "net.2"),
    qkv="linear_q_k_v",
    out="linear_out",
    speech=("audio_projection.speech.0", "audio_projection.speech.2"),
    vision=("audio_projection.vision.0", "audio_projection.vision.2"),
)


def sound_options(whole: JsonObject) -> JsonObject:
    """Return the encoder's config with transformers' keys and the usual values of absent ones.

    Raises:
        UnsupportedModelError: an option is not computed.
    """
    ours = whole.child("audio_config")
    theirs = whole.child("audio_processor").child("config")
    values = {_RENAMED.get(key, key): value for key, value in theirs.values.items()}
    if "nemo_conv_settings" in theirs:
        values["nemo_conv_channels"] = theirs.child("nemo_conv_settings").integer("conv_channels")
    if "relative_attention_bias_args" in theirs:
        bias = theirs.child("relative_attention_bias_args")
        values["bias_max_distance"] = bias.integer("t5_bias_max_distance")
        values["bias_symmetric"] = bias.get("t5_bias_symmetric")
    found = JsonObject(ours.where, {**_USUAL, **values, **ours.values}, refused=whole.refused)
    size = found.integer("hidden_size")
    for key in ("activation", "conv_activation", "conv_glu_type"):
        found.only(key, "swish", "silu")
    for key in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        found.only(key, size)
    found.only("nemo_activation", "relu")
    found.only("chunk_size", -1)
    found.only("depthwise_multiplier", 1)
    found.only("input_size", BINS)
    found.only("time_reduction", REDUCTION)
    found.only("bias_symmetric", False)
    found.only("downsample_rate", 1)
    return found


class Subsampling(Module):
    """Three convolutions of 3 x 3 that halve frames and bins, the last two per channel and then across channels."""

    def __init__(self, tower: Tower, options: JsonObject, at: str) -> None:
        super().__init__()
        self.channels = options.integer("nemo_conv_channels")
        bins = BINS
        for _ in range(LEVELS):
            bins = (bins + 1) // 2
        self.first = PatchLinear(
            patch=(1, _KERNEL, _KERNEL),
            outputs=self.channels,
            bias=True,
            dtype=tower.dtype,
            name=f"{at}.conv.0",
        )
        self.kernels, self.biases, self.mixers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level in range(1, LEVELS):
            name = f"{at}.conv.{3 * level - 1}"
            stored = (self.channels, 1, _KERNEL, _KERNEL)
            self.kernels.append(_table(tower, self.channels, _KERNEL**2, name=name, stored=stored))
            self.biases.append(_table(tower, self.channels, name=name, suffix=".bias"))
            self.mixers.append(_pointwise(tower, self.channels, self.channels, f"{at}.conv.{3 * level}", 2))
        self.out = tower.linear(bins * self.channels, options.integer("hidden_size"), True, f"{at}.out")
        self.flops_per_row = 6.0 * BINS / 4 * self.channels**2

    def forward(self, frames: Tensor, rows: slice) -> Tensor:
        """Compute some rows [n, C] of all frames [T, B]."""
        reduced = self._level(LEVELS, frames, rows.start, rows.stop)
        found: Tensor = self.out(reduced.transpose(1, 2).flatten(1), NO_STEP)
        return found

    def _level(self, level: int, frames: Tensor, first: int, last: int) -> Tensor:
        """Compute rows [last - first, bins, K] behind so many convolutions; [n, B, 1] behind none."""
        if level == 0:
            return frames[first:last, :, None]
        low, high = 2 * first - 1, 2 * last
        count = -(-len(frames) // 2 ** (level - 1))
        below = self._level(level - 1, frames, max(low, 0), min(high, count))
        below = F.pad(below, (0, 0, 1, 1, max(-low, 0), max(high - count, 0)))
        if level == 1:
            windows = below[:, :, 0].unfold(0, _KERNEL, 2).unfold(1, _KERNEL, 2)  # [n, bins, 3, 3]
            mixed = self.first(windows.reshape(-1, _KERNEL**2), NO_STEP)
            return PLAIN["relu"](mixed).view(*windows.shape[:2], -1)
        apart = self._apart(level - 2, below)
        mixed = self.mixers[level - 2](apart.flatten(0, 1), NO_STEP)
        return PLAIN["relu"](mixed).view(*apart.shape[:2], -1)

    def _apart(self, index: int, x: Tensor) -> Tensor:
        """Convolve each channel of padded rows by itself: [2 n + 1, 2 m + 1, K] -> [n, m, K]."""
        kernel, bias = self.kernels[index], self.biases[index]
        assert isinstance(kernel, LearnedTable)
        assert isinstance(bias, LearnedTable)
        rows, bins = (x.shape[0] - 1) // 2, (x.shape[1] - 1) // 2
        total = bias.weight.expand(rows, bins, -1)
        for place in range(_KERNEL**2):
            down, across = divmod(place, _KERNEL)
            shifted = x[down : down + 2 * rows - 1 : 2, across : across + 2 * bins - 1 : 2]
            total = total + shifted * kernel.weight[:, place]
        return total


class HalfMLP(Module):
    """Norm and gated MLP, of which half is added to the stream."""

    def __init__(self, tower: Tower, size: int, inner: int, at: str, names: tuple[str, str]) -> None:
        super().__init__()
        self.norm = tower_norm(tower.config, "layer", size, _EPS, f"{at}.layer_norm")
        self.up = tower.linear(size, 2 * inner, True, f"{at}.{names[0]}")
        self.down = tower.linear(inner, size, True, f"{at}.{names[1]}")
        self.flops_per_row = 6.0 * size * inner

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, C] plus half of its MLP."""
        inner = gated_by_second(self.up(self.norm(x), NO_STEP))
        found: Tensor = x + 0.5 * self.down(inner, NO_STEP)
        return found


class Phi4Convolution(Module):
    """Norm, gate, causal convolution of each channel, and two linear layers with SiLU between them."""

    def __init__(self, tower: Tower, size: int, kernel: int, at: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm = tower_norm(tower.config, "layer", size, _EPS, f"{at}.layer_norm")
        self.gate = _pointwise(tower, size, 2 * size, f"{at}.glu.ext_pw_conv_1d", 1)
        self.before, self.inside = (
            _table(tower, size, name=f"{at}.glu.b{number}", suffix="", stored=(1, size, 1))
            for number in (1, 2)
        )
        apart = f"{at}.dw_sep_conv_1d.dw_conv"
        self.taps = _table(tower, size, kernel, name=apart, stored=(size, 1, kernel))
        self.bias = _table(tower, size, name=apart, suffix=".bias")
        self.mix = _pointwise(tower, size, size, f"{at}.dw_sep_conv_1d.pw_conv", 1)
        self.out = _pointwise(tower, size, size, f"{at}.ext_pw_conv_1d", 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, C] plus its convolution, which sees earlier rows only."""
        both = self.gate(self.norm(x), NO_STEP)
        both = both + torch.cat((self.before.weight, self.inside.weight))
        padded = F.pad(gated_by_second(both), (0, 0, self.kernel - 1, 0))
        total = self.bias.weight.expand(len(x), -1)
        for tap in range(self.kernel):
            total = total + padded[tap : tap + len(x)] * self.taps.weight[:, tap]
        found: Tensor = x + self.out(PLAIN["silu"](self.mix(total, NO_STEP)), NO_STEP)
        return found


class Phi4ConformerBlock(SlicedBlock):
    """Half an MLP, attention, a convolution and half an MLP, each added to the stream, and a norm."""

    def __init__(self, tower: Tower, shape: BlockShape, kernel: int, at: str, names: SoundNames) -> None:
        super().__init__(shape)
        config, size = tower.config, shape.channels
        self.first = HalfMLP(tower, size, shape.inner, f"{at}.feed_forward_in", names.mlp)
        self.last = HalfMLP(tower, size, shape.inner, f"{at}.feed_forward_out", names.mlp)
        self.norm_attention = tower_norm(config, "layer", size, _EPS, f"{at}.layer_norm_att")
        self.norm = tower_norm(config, "layer", size, _EPS, f"{at}.layer_norm")
        self.qkv = QKVLinear(
            hidden_size=size,
            num_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_dim=shape.head_dim,
            bias=True,
            dtype=tower.dtype,
            name=f"{at}.self_attn.{names.qkv}",
        )
        self.out = tower.linear(size, size, True, f"{at}.self_attn.{names.out}")
        self.convolution = Phi4Convolution(tower, size, kernel, f"{at}.conv")

    def slices(
        self,
        x: Tensor,
        metadata: GroupMetadata,
        angles: Tensor | None = None,
        relative_bias: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Generator[None, None, Tensor]:
        x = yield from by_rows(self.first, x, self.first.flops_per_row)
        x = yield from super().slices(x, metadata, angles, relative_bias, hidden)
        x = self.convolution(x)
        yield
        x = yield from by_rows(self.last, x, self.last.flops_per_row)
        found: Tensor = self.norm(x)
        return found

    def _heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.heads(self.norm_attention(x), NO_STEP)
        return q, k, v

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        found: Tensor = x + self.out(attended, NO_STEP)
        return found


class Phi4Ears(Module):
    """Encoder of sounds with its projections; `at` is the prefix of its tensors."""

    def __init__(self, tower: Tower, whole: JsonObject, names: SoundNames, at: str) -> None:
        super().__init__()
        options, encoder = sound_options(whole), f"{at}.encoder"
        size, heads = options.integer("hidden_size"), options.integer("num_attention_heads")
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=options.integer("intermediate_size"),
            eps=_EPS,
            activate=PLAIN["silu"],
        )
        self.mean, self.inverse_deviation = (
            _table(tower, BINS, name=f"{encoder}.encoder_embedding.global_{name}", suffix="")
            for name in ("mean", "invstd")
        )
        self.embed = Subsampling(tower, options, f"{encoder}.embed")
        self.farthest = options.integer("bias_max_distance")
        self.distances = _table(
            tower, 2 * self.farthest, heads, name=f"{encoder}.relative_attention_bias_layer.bias_values"
        )
        self.blocks = nn.ModuleList(
            Phi4ConformerBlock(
                tower, shape, options.integer("kernel_size"), f"{encoder}.encoders.{number}", names
            )
            for number in range(options.integer("num_blocks"))
        )
        self.alone, self.beside_images = (
            Projection(
                tower.linear(size, tower.hidden_size, True, f"{at}.{up}"),
                tower.linear(tower.hidden_size, tower.hidden_size, True, f"{at}.{down}"),
                PLAIN["gelu"],
            )
            for up, down in (names.speech, names.vision)
        )
        self.flops_per_row = 2.0 * tower.hidden_size * (size + tower.hidden_size)
        self.tower = [tower]  # Not a submodule.

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from `input_features` [1, T, B], and perhaps `beside_images`."""
        given, (tower,) = arrays[FEATURES], self.tower
        if given.ndim != 3 or len(given) != 1 or given.shape[2] != BINS or not given.shape[1]:
            raise ValidationError(f"a spectrogram must be [1, frames, {BINS}], got {list(given.shape)}")
        frames = (tower.to_device(given[0]) - self.mean.weight) * self.inverse_deviation.weight
        projection = self.beside_images if BESIDE_IMAGES in arrays else self.alone
        count, bias = -(-len(frames) // REDUCTION), self._bias()
        done = []
        for first in range(0, count, CHUNK):
            last = min(first + CHUNK, count)
            x = yield from self._embedded(frames, first, last)
            x = F.pad(x, (0, 0, 0, CHUNK - len(x) if count > CHUNK else 0))
            together = sequences([len(x)], x.device)
            for block in self.blocks:
                assert isinstance(block, Phi4ConformerBlock)
                x = yield from block.slices(x, together, relative_bias=bias)
            done.append((yield from by_rows(projection, x[: last - first], self.flops_per_row)))
        return Embeddings(torch.cat(done))

    def _embedded(self, frames: Tensor, first: int, last: int) -> Generator[None, None, Tensor]:
        """Compute the rows [first, last) behind the convolutions."""
        done = []
        for rows in chunks(last - first, self.embed.flops_per_row):
            done.append(self.embed(frames, slice(first + rows.start, first + rows.stop)))
            yield
        return torch.cat(done)

    def _bias(self) -> Tensor:
        """Return what is added to scores, float32 [h, 2 * CHUNK - 1], by key minus query position."""
        offsets = torch.arange(1 - CHUNK, CHUNK).clamp(-self.farthest, self.farthest - 1)
        weight = self.distances.weight
        return weight.float()[(offsets + self.farthest).to(weight.device)].t().contiguous()


def _table(tower: Tower, *shape: int, name: str, suffix: str = ".weight", stored: Any = None) -> LearnedTable:
    return LearnedTable(*shape, config=tower.config, name=name, suffix=suffix, stored=stored)


def _pointwise(tower: Tower, inputs: int, outputs: int, name: str, ones: int) -> PatchLinear:
    """Return a linear layer that a checkpoint stores as a convolution of so many dimensions, each of length 1."""
    return PatchLinear(patch=(inputs, *(1,) * ones), outputs=outputs, bias=True, dtype=tower.dtype, name=name)
