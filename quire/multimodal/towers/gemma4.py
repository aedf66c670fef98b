# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's tower (Google, 2026): patches with rows of two tables and 2-D rotary positions, averaged by squares.

Its smaller models have an encoder of sounds as well (`usm.py`).
Shapes: n patches of an image, C channels, h heads of size D, m embeddings, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.activation import FUNCTIONS
from quire.layers.base import Layer, Module, activation_dtype, parameter
from quire.layers.norm import RMSNorm
from quire.layers.slot import Slot, TensorPart
from quire.models.families.fields import GATED_ACTIVATIONS
from quire.models.json_object import JsonObject
from quire.multimodal.processors.gemma4 import PLACES, VALUES, VIDEO_PLACES, VIDEO_VALUES
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.processors.usm import CHANNELS_KEY, channels_of
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Slices,
    Tower,
    activation_of,
    in_slices,
    merged_squares,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, SlicedBlock
from quire.multimodal.towers.usm import (
    ChannelNorm,
    ConformerShape,
    Convolution,
    PartNames,
    UsmEncoder,
    sizes_of,
)
from quire.worker.media_rows import Embeddings

_AT, _EARS_AT = "vision_tower", "audio_tower"
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


class Bounds(Layer):
    """Least and greatest values of a linear layer's inputs and outputs, each a tensor [] of the checkpoint."""

    names = ("input_min", "input_max", "output_min", "output_max")
    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, *, config: EngineConfig, name: str) -> None:
        super().__init__(name)
        for bound in self.names:
            setattr(self, bound, parameter(1, dtype=activation_dtype(config)))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        around = names[0].rpartition(".")[0]
        for bound in self.names:
            target = getattr(self, bound)
            yield f"{around}.{bound}", Slot(target, "zeros", replace(TensorPart.all(target.shape), stored=()))


class BoundedLinear(Module):
    """Linear layer without bias whose inputs and outputs are clamped, if the checkpoint has bounds for them."""

    def __init__(self, tower: Tower, inputs: int, outputs: int, bounded: bool, name: str) -> None:
        super().__init__()
        self.linear = tower.linear(inputs, outputs, False, f"{name}.linear")
        self.bounds = Bounds(config=tower.config, name=f"{name}.bounds") if bounded else None

    def forward(self, x: Tensor) -> Tensor:
        """x [n, K] -> [n, N]."""
        if self.bounds is None:
            out: Tensor = self.linear(x, NO_STEP)
            return out
        out = self.linear(x.clamp(self.bounds.input_min, self.bounds.input_max), NO_STEP)
        return out.clamp(self.bounds.output_min, self.bounds.output_max)


class Gemma4VisionBlock(SlicedBlock):
    """Attention and then a gated MLP, each between two norms; heads are normed, values without weights."""

    def __init__(self, tower: Tower, shape: BlockShape, bounded: bool, at: str) -> None:
        super().__init__(shape)
        size, wide = shape.channels, shape.heads * shape.head_dim
        self.eps, self.dtype = shape.eps, activation_dtype(tower.config)

        def linear(inputs: int, outputs: int, name: str) -> BoundedLinear:
            return BoundedLinear(tower, inputs, outputs, bounded, f"{at}.{name}")

        self.qkv = nn.ModuleList(linear(size, wide, f"self_attn.{each}_proj") for each in "qkv")
        self.out = linear(wide, size, "self_attn.o_proj")
        self.gate, self.up = (linear(size, shape.inner, f"mlp.{each}_proj") for each in ("gate", "up"))
        self.down = linear(shape.inner, size, "mlp.down_proj")
        self.norms = nn.ModuleList(self._norm(size, f"{at}.{each}_layernorm") for each in _NORMS)
        self.head_norms = nn.ModuleList(
            self._norm(shape.head_dim, f"{at}.self_attn.{each}_norm", has_weight=each != "v")
            for each in "qkv"
        )
        self.function = FUNCTIONS[shape.gated]

    def _norm(self, size: int, name: str, *, has_weight: bool = True) -> RMSNorm:
        return RMSNorm(size=size, eps=self.eps, dtype=self.dtype, has_weight=has_weight, name=name)

    def _heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x, heads = self.norms[0](x), (len(x), self.shape.heads, self.shape.head_dim)
        q, k, v = (
            norm(linear(x).view(heads)) for linear, norm in zip(self.qkv, self.head_norms, strict=True)
        )
        assert angles is not None, "patches have places"
        return *_rotated(q, k, angles), v

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        _, after, before_mlp, after_mlp = self.norms
        x = x + after(self.out(attended))
        y = before_mlp(x)
        out: Tensor = x + after_mlp(self.down(ops.activate(self.gate(y), self.function) * self.up(y)))
        return out


def _rotated(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each half of q and k [n, h, D] by its half of the angles [n, D]: cosines and then sines."""
    num, heads, size = q.shape
    q, k = (x.view(num, heads, 2, size // 2).transpose(1, 2).reshape(2 * num, heads, -1) for x in (q, k))
    places = torch.arange(2 * num, device=q.device)
    turned = ops.rotary_embedding(places, q, k, angles.reshape(2 * num, size // 2), False)
    q, k = (x.view(num, 2, heads, -1).transpose(1, 2).reshape(num, heads, size) for x in turned)
    return q, k


class Gemma4Vision(Module):
    """Patches, blocks and averages, through one matrix."""

    def __init__(self, tower: Tower, eyes: JsonObject) -> None:
        super().__init__()
        self.tower = (tower,)  # in a tuple, so that nn.Module does not register it
        eyes.only("attention_bias", False)
        size, heads = eyes.integer("hidden_size", 768), eyes.integer("num_attention_heads", 12)
        eyes.only("num_key_value_heads", heads)
        self.square = eyes.integer("pooling_kernel_size", 3)
        patch, self.num_places = (
            eyes.integer("patch_size", 16),
            eyes.integer("position_embedding_size", 10240),
        )
        self.patch = PatchLinear(
            patch=(3 * patch * patch,),
            outputs=size,
            bias=False,
            dtype=tower.dtype,
            name=f"{_AT}.patch_embedder.input_proj",
        )
        self.places = self._table(
            2, self.num_places, size, name=f"{_AT}.patch_embedder.position_embedding_table"
        )
        rope = eyes.child("rope_parameters")
        rope.only("rope_type", "axial")
        self.theta = rope.number("rope_theta", 100.0)
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=eyes.integer("head_dim", 64),
            inner=eyes.integer("intermediate_size", 3072),
            eps=eyes.number("rms_norm_eps", 1e-6),
            activate=torch.nn.functional.gelu,
            gated=eyes.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
            scale=1.0,
        )
        if shape.head_dim % 4:
            raise eyes.unsupported(
                "head_dim", "a multiple of 4: half of the pairs turn by column, half by row"
            )
        self.shape, bounded = shape, eyes.flag("use_clipped_linears", False)
        self.blocks = nn.ModuleList(
            Gemma4VisionBlock(tower, shape, bounded, f"{_AT}.encoder.layers.{number}")
            for number in range(eyes.integer("num_hidden_layers", 16))
        )
        self.shift = self.factor = None
        if eyes.flag("standardize", False):
            self.shift = self._table(size, name=f"{_AT}.std_bias")
            self.factor = self._table(size, name=f"{_AT}.std_scale")
        self.projection = Projected(tower, size, shape.eps, "embed_vision")

    def _table(self, *shape: int, name: str) -> LearnedTable:
        return LearnedTable(*shape, config=self.tower[0].config, name=name)

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from the patches [1, n', 3 * p * p] of an image and their columns and rows [1, n', 2], -1
        where is none; of a video [T, n', 3 * p * p] and [T, n', 2], one frame at a time.
        """
        names = (VIDEO_VALUES, VIDEO_PLACES) if VIDEO_VALUES in arrays else (VALUES, PLACES)
        found = []
        for values, places in zip(*(arrays[name] for name in names), strict=True):
            found.append((yield from self._frame(values, places)))
        return Embeddings(torch.cat(found))

    def _frame(self, values: NDArray[Any], places: NDArray[Any]) -> Generator[None, None, Tensor]:
        (tower,) = self.tower
        values, across, down = self._patches(values, places)
        columns, rows = int(across.max()) + 1, int(down.max()) + 1
        x = yield from in_slices(self.patch, 2 * (values - np.float32(0.5)), tower)
        columns_of, rows_of = (torch.from_numpy(place.copy()).to(tower.device) for place in (across, down))
        x = x + (self.places.weight[0, columns_of] + self.places.weight[1, rows_of])
        yield
        angles, metadata = self._angles(columns_of, rows_of), sequences([len(x)], tower.device)
        for block in self.blocks:
            assert isinstance(block, Gemma4VisionBlock)
            x = yield from block.slices(x, metadata, angles)
        squares = merged_squares(x.float(), rows, columns, self.square)
        pooled = torch.unflatten(squares, 1, (self.square**2, -1)).mean(1) * self.shape.channels**0.5
        if self.shift is not None and self.factor is not None:
            pooled = (pooled - self.shift.weight.float()) * self.factor.weight.float()
        out: Tensor = self.projection(pooled.to(x.dtype))
        return out

    def _patches(
        self, values: NDArray[Any], places: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return patches [n, K], and the column and row of each.

        Raises:
            ValidationError: they are no whole rectangle of squares, or have no places in the table.
        """
        known = (places >= 0).all(-1)
        across, down = places[known].T
        most = (int(across.max(initial=-1)) + 1, int(down.max(initial=-1)) + 1)
        whole = len(across) == most[0] * most[1] > 0 and not any(side % self.square for side in most)
        if not whole or max(most) > self.num_places:
            raise ValidationError(
                f"an image of {most[1]} x {most[0]} patches has no embedding: sides must be multiples of "
                f"{self.square}, at most {self.num_places}"
            )
        return values[known], across, down

    def _angles(self, across: Tensor, down: Tensor) -> Tensor:
        """Return [n, D]: cosines and sines by column, then those by row."""
        quarter = self.shape.head_dim // 4
        frequencies = 1.0 / (self.theta ** (torch.arange(quarter, device=across.device).float() / quarter))
        angles = [place.float()[:, None] * frequencies for place in (across, down)]
        return torch.cat([turn for angle in angles for turn in (angle.cos(), angle.sin())], 1)


class Projected(Module):
    """Norm without weights and one matrix: [m, K] -> [m, H]."""

    def __init__(self, tower: Tower, size: int, eps: float, at: str) -> None:
        super().__init__()
        dtype = activation_dtype(tower.config)
        self.norm = RMSNorm(size=size, eps=eps, dtype=dtype, has_weight=False, name=f"{at}.norm")
        self.linear = tower.linear(size, tower.hidden_size, False, f"{at}.embedding_projection")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x), NO_STEP)
        return out


_EAR_NAMES = PartNames(
    first="feed_forward1",
    last="feed_forward2",
    attention="self_attn",
    relative="self_attn.relative_k_proj",
    post="self_attn.post",
    norm_before="norm_pre_attn",
    norm_after="norm_post_attn",
    norm="norm_out",
)


def _reach(ears: JsonObject) -> int:
    """Return the rows to which a row attends.

    Raises:
        UnsupportedModelError: the distance of a row to itself is not 0, which another size of a chunk would cause.
    """
    ears.only("attention_context_right", 0)
    reach = ears.integer("attention_context_left", 13, low=2) - 1
    if ears.integer("attention_chunk_size", 12) != reach:
        raise ears.unsupported("attention_chunk_size", f"{reach}, one less than attention_context_left")
    return reach


class Gemma4Ears(Module):
    """Encoder of sounds and two matrices behind it."""

    def __init__(self, tower: Tower, ears: JsonObject) -> None:
        super().__init__()
        self.tower = (tower,)  # in a tuple, so that nn.Module does not register it
        channels, heads = sizes_of(ears, 1024, "num_attention_heads")
        eps, bounded = ears.number("rms_norm_eps", 1e-6), ears.flag("use_clipped_linears", True)

        def make(inputs: int, outputs: int, name: str) -> BoundedLinear:
            return BoundedLinear(tower, inputs, outputs, bounded, name)

        shape = ConformerShape(
            channels=channels,
            heads=heads,
            taps=ears.integer("conv_kernel_size", 5),
            reach=_reach(ears),
            cap=ears.number("attention_logit_cap", 50.0, low=1e-6),
            limit=ears.number("gradient_clipping", 1e10),
            residual_weight=ears.number("residual_weight", 0.5),
            eps=eps,
            key_scale=math.log(1 + math.e) / math.log(2),
            activate=activation_of(ears, "hidden_act", "silu"),
            make=make,
            names=_EAR_NAMES,
        )
        at = f"{_EARS_AT}.subsample_conv_projection"
        first, second = channels_of(ears, CHANNELS_KEY)
        convolutions = [
            Convolution(
                tower,
                sizes,
                ChannelNorm(tower, sizes[1], eps, f"{at}.layer{number}.norm"),
                f"{at}.layer{number}",
                before=1,
            )
            for number, sizes in enumerate(((1, first), (first, second)))
        ]
        blocks = [f"{_EARS_AT}.layers.{number}" for number in range(ears.integer("num_hidden_layers", 12))]
        bands = first // 4 * 4
        self.encoder = UsmEncoder(tower, shape, convolutions, bands, blocks, f"{at}.input_proj_linear")
        size = ears.integer("output_proj_dims", 1536)
        self.out = tower.linear(channels, size, True, f"{_EARS_AT}.output_proj")
        self.projection = Projected(tower, size, eps, "embed_audio")

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from a spectrogram [1, F, B]."""
        (tower,) = self.tower
        rows = yield from self.encoder.slices(self.encoder.features(tower, arrays))
        return Embeddings(self.projection(self.out(rows, NO_STEP)))


class Gemma4Tower(Tower):
    """Tower of Gemma 4's images and videos, and of its sounds if the model takes some."""

    parts: tuple[str, ...] = (f"{_AT}.", "embed_vision.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        self.vision = Gemma4Vision(self, whole.child("vision_config"))
        self.ears: Gemma4Ears | None = None
        if "audio_config" in whole:
            self.ears = Gemma4Ears(self, whole.child("audio_config"))
            self.parts = (*self.parts, f"{_EARS_AT}.", "embed_audio.")

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from the arrays of an image or a sound."""
        if FEATURES not in arrays:
            return self.vision.slices(arrays)
        if self.ears is None:
            raise ValidationError("the model has no encoder of sounds")
        return self.ears.slices(arrays)
