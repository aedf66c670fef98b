# SPDX-License-Identifier: Apache-2.0
"""Tower of Phi-4-multimodal (2025, arXiv:2503.01743), for images: SigLIP over crops, averaged and separated by row.

Attention is within a crop, in both directions, to what shows the image. transformers 5.23 computes so with eager
attention; with SDPA, an image that fills all its crops becomes causal there.

Shapes: t crops, n patches, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.activation import PLAIN
from quire.layers.base import Module
from quire.models.json_object import JsonObject
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.towers.base import (
    Arrays,
    LearnedTable,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    activation_of,
    chunks,
    in_slices,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock
from quire.multimodal.towers.phi4_sound import ORIGINAL_NAMES as ORIGINAL_SOUND_NAMES
from quire.multimodal.towers.phi4_sound import Phi4Ears, SoundNames
from quire.worker.media_rows import Embeddings

ORIGINAL = "Phi4MMForCausalLM"
"""Architecture of the checkpoints in the form of their authors, whose tensors have other names."""
_AT = "embed_tokens_extend"
_EYES = f"{_AT}.image_embed"
_SQUARE = 2
_JOINED = {name: parts for name, parts in Tower.joined.items() if name != "gate_up_proj"}
"""Its checkpoints have gate and up as one tensor."""


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors in which the two forms of checkpoints differ."""

    eyes_up: str = "img_projection_up"
    eyes_down: str = "img_projection_down"
    whole_separator: str = "global_img_feature_extensor"
    row_separator: str = "sub_img_feature_extensor"


_ORIGINAL_NAMES = TensorNames(
    eyes_up="img_projection.0",
    eyes_down="img_projection.2",
    whole_separator="glb_GN",
    row_separator="sub_GN",
)


@dataclass(frozen=True)
class Crop:
    """Patches of a crop that are computed, and how many rows and columns of them show the image."""

    rows: int
    columns: int
    shown: tuple[int, int]

    @classmethod
    def of_mask(cls, mask: NDArray[Any]) -> Crop:
        """Return the crop of a mask [side, side] whose first rows and columns are true.

        The squares of patches that become embeddings may contain patches that are not shown.
        """
        shown = int(np.count_nonzero(mask[:, 0])), int(np.count_nonzero(mask[0]))
        if not all(shown):
            raise ValidationError("a crop shows nothing of the image")
        rows, columns = (count + count % _SQUARE for count in shown)
        return cls(rows, columns, shown)

    def hidden(self) -> Tensor:
        """Return whether each patch [rows * columns] shows nothing."""
        rows, columns = torch.arange(self.rows), torch.arange(self.columns)
        return ((rows >= self.shown[0])[:, None] | (columns >= self.shown[1])).flatten()

    def places(self, side: int) -> Tensor:
        """Return the learned position of each patch: the nearest one, as a share of the image; 0 if it is hidden."""
        rows, columns = (
            _shares(count, length, side)
            for count, length in zip(self.shown, (self.rows, self.columns), strict=True)
        )
        return (rows[:, None] * side + columns).flatten().masked_fill(self.hidden(), 0)


def _shares(count: int, length: int, side: int) -> Tensor:
    edges = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.arange(length, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(shares.clamp(max=1.0 - 1e-6), edges, right=True)


class Phi4Eyes(Module):
    """Encoder of images with its projection."""

    def __init__(self, tower: Tower, whole: JsonObject, names: TensorNames) -> None:
        super().__init__()
        eyes, config, at = whole.child("vision_config"), tower.config, f"{_EYES}.img_processor"
        size, patch = eyes.integer("hidden_size", 1152), eyes.integer("patch_size", 14)
        heads, depth = eyes.integer("num_attention_heads", 16), eyes.integer("num_hidden_layers", 27)
        self.side = eyes.integer("image_size", 448) // patch
        if self.side % _SQUARE:
            raise eyes.unsupported("image_size", f"a multiple of {_SQUARE * patch}")
        read = eyes.integer("feature_layer", -2, low=-depth - 1, high=depth)
        used = depth + 1 + read if read < 0 else read
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=eyes.integer("intermediate_size", 4304),
            eps=eyes.number("layer_norm_eps", 1e-6),
            activate=activation_of(eyes, "hidden_act", "gelu_pytorch_tanh"),
        )
        self.patch = PatchLinear(
            patch=(eyes.integer("num_channels", 3), patch, patch),
            outputs=size,
            bias=True,
            dtype=tower.dtype,
            name=f"{at}.embeddings.patch_embedding",
        )
        self.positions = LearnedTable(
            self.side**2, size, config=config, name=f"{at}.embeddings.position_embedding", suffix=".weight"
        )
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{at}.encoder.layers.{number}")
            for number in range(used)
        )
        unread = [rf"encoder\.layers\.{number}" for number in range(used, depth)]
        self.unused = (rf"^{at}\.({'|'.join([*unread, 'post_layernorm', 'head'])})\.",)
        self.row_end, self.whole_begin = (
            LearnedTable(size, config=config, name=f"{_EYES}.{name}", stored=(1,) * leading + (size,))
            for name, leading in ((names.row_separator, 3), (names.whole_separator, 2))
        )
        self.projection = Projection(
            tower.linear(size, tower.hidden_size, True, f"{_EYES}.{names.eyes_up}"),
            tower.linear(tower.hidden_size, tower.hidden_size, True, f"{_EYES}.{names.eyes_down}"),
            PLAIN["gelu"],
        )
        self.tower = [tower]  # Not a submodule.

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H]: rows of the crops, and then those of the whole image, which is the first crop."""
        (tower,) = self.tower
        crops = [Crop.of_mask(mask) for mask in arrays["image_attention_mask"][0]]
        patches = [
            _patches(pixels, crop, self.side)
            for pixels, crop in zip(arrays["image_pixel_values"][0], crops, strict=True)
        ]
        x = yield from in_slices(self.patch, np.concatenate(patches), tower)
        places = torch.cat([crop.places(self.side) for crop in crops])
        x = x + ops.embedding(places.to(x.device), self.positions.weight)
        hidden = torch.cat([crop.hidden() for crop in crops]).to(x.device)
        alone = sequences([crop.rows * crop.columns for crop in crops], x.device)
        for block in self.blocks:
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, alone, hidden=hidden if bool(hidden.any()) else None)
        columns = int(arrays["image_sizes"][0, 1]) // arrays["image_pixel_values"].shape[-1]
        rows = self._separated(x, crops, columns)
        found = []
        for own in chunks(len(rows), 4.0 * rows.shape[1] * tower.hidden_size):
            found.append(self.projection(rows[own]))
            yield
        return Embeddings(torch.cat(found))

    def _separated(self, x: Tensor, crops: list[Crop], columns: int) -> Tensor:
        """Return the averages of squares [m, C], with a separator behind each row and before the whole image."""
        tiles = torch.split_with_sizes(x, [crop.rows * crop.columns for crop in crops])
        whole, *parts = [_averaged(tile, crop) for tile, crop in zip(tiles, crops, strict=True)]
        lines = [torch.cat(parts[first : first + columns], 1) for first in range(0, len(parts), columns)]
        ended = [self._ended(torch.cat(lines)), self.whole_begin.weight[None], self._ended(whole)]
        return torch.cat(ended)

    def _ended(self, picture: Tensor) -> Tensor:
        """Append the separator to each row of [rows, columns, C]: [rows * (columns + 1), C]."""
        ends = self.row_end.weight.expand(len(picture), 1, -1)
        return torch.cat((picture, ends), 1).flatten(0, 1)


def _patches(pixels: NDArray[np.float32], crop: Crop, side: int) -> NDArray[np.float32]:
    """Return the patches [rows * columns, 3 * patch * patch] of a crop [3, P, P]."""
    colors, patch = len(pixels), pixels.shape[-1] // side
    grid = pixels.reshape(colors, side, patch, side, patch)[:, : crop.rows, :, : crop.columns]
    return grid.transpose(1, 3, 0, 2, 4).reshape(crop.rows * crop.columns, -1)


def _averaged(x: Tensor, crop: Crop) -> Tensor:
    """Return the averages [rows / 2, columns / 2, C] of squares of patches."""
    squares = x.view(crop.rows // _SQUARE, _SQUARE, crop.columns // _SQUARE, _SQUARE, -1)
    total = (squares[:, 0, :, 0] + squares[:, 0, :, 1]) + (squares[:, 1, :, 0] + squares[:, 1, :, 1])
    return total / _SQUARE**2


class Phi4Tower(Tower):
    """Encoders of images and of sounds."""

    parts = (f"{_AT}.",)
    joined = _JOINED

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        is_original = whole.get("architectures") == [ORIGINAL]
        names = _ORIGINAL_NAMES if is_original else TensorNames()
        self.eyes = Phi4Eyes(self, whole, names)
        of_sounds = ORIGINAL_SOUND_NAMES if is_original else SoundNames()
        self.ears = Phi4Ears(self, whole, of_sounds, f"{_AT}.audio_embed")
        self.unused = self.eyes.unused

    def slices(self, arrays: Arrays) -> Slices:
        """Compute an image or a sound, by the names of its arrays."""
        return (yield from (self.ears if FEATURES in arrays else self.eyes).slices(arrays))
