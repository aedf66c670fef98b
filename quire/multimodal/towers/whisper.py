# SPDX-License-Identifier: Apache-2.0
"""Encoder of Whisper (Radford et al., 2022, arXiv:2212.04356): two convolutions and blocks over a log-mel spectrogram.

Shapes: F frames of B mel bins, E = F / 2 rows of the output, C channels.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError, ValidationError
from quire.layers.base import Module
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Slices,
    Tower,
    activation_of,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings

FEATURES = "input_features"
_KERNEL = 3


class Spectrograms:
    """Processor of sounds: the file of an item has what the encoder takes."""

    @staticmethod
    def floats(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return `input_features` float32 [1, B, F]."""
        return {FEATURES: np.asarray(arrays[FEATURES], dtype=np.float32)}


class SpectrogramEncoder(Module):
    """Encoder up to its last block: convolutions, positions and blocks, without the final norm.

    Args:
        tower: owner.
        options: the encoder's config, with Whisper's keys.
        at: prefix of its tensors.
    """

    def __init__(self, tower: Tower, options: JsonObject, at: str) -> None:
        super().__init__()
        config, size = tower.config, options.integer("d_model")
        self.size = size
        self.bins = options.integer("num_mel_bins", 80)
        self.length = options.integer("max_source_positions", 1500)
        heads = options.integer("encoder_attention_heads")
        self.activate = activation_of(options, "activation_function", "gelu")
        self.conv1, self.conv2 = (
            PatchLinear(
                patch=(inputs, _KERNEL), outputs=size, bias=True, dtype=tower.dtype, name=f"{at}.{name}"
            )
            for name, inputs in (("conv1", self.bins), ("conv2", size))
        )
        self.positions = LearnedTable(
            self.length, size, config=config, name=f"{at}.embed_positions", suffix=".weight"
        )
        self.shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=options.integer("encoder_ffn_dim"),
            eps=1e-5,
            activate=self.activate,
            key_bias=False,
            norms=("self_attn_layer_norm", "final_layer_norm"),
            mlp=("fc1", "fc2"),
        )
        self.layers = nn.ModuleList(
            TowerBlock(config=config, shape=self.shape, at=f"{at}.layers.{layer}")
            for layer in range(options.integer("encoder_layers"))
        )

    def slices(
        self, given: Tensor, num_rows: int, hidden: Tensor | None = None
    ) -> Generator[None, None, Tensor]:
        """Compute the first rows [num_rows, C] of a spectrogram [B, F]; later frames affect the last row only.

        `hidden` [num_rows] are the rows to which no row attends; None: there are none.
        """
        x = self._convolved(self.conv1, given, 1)
        yield
        x = self._convolved(self.conv2, x.T, 2)[:num_rows] + self.positions.weight[:num_rows]
        yield
        alone = sequences([num_rows], x.device)
        for layer in self.layers:
            assert isinstance(layer, TowerBlock)
            x = yield from layer.slices(x, alone, hidden=hidden)
        return x

    def _convolved(self, layer: PatchLinear, x: Tensor, stride: int) -> Tensor:
        """Convolve [K, F] with a kernel of three, padded by one -> activated [F / stride, N]."""
        windows = F.pad(x, (1, 1)).unfold(1, _KERNEL, stride)  # [K, frames, 3]
        flat = windows.permute(1, 0, 2).reshape(windows.shape[1], -1)
        return self.activate(layer(flat, NO_STEP))


class WhisperTower(Tower):
    """Encoder with its final norm; there is no projection."""

    parts = ("encoder.",)

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        size = whole.integer("d_model")
        if size != self.hidden_size:
            raise UnsupportedModelError(
                f"{whole.where}: d_model is {size}, the decoder has {self.hidden_size}"
            )
        self.encoder = SpectrogramEncoder(self, whole, "encoder")
        self.norm = tower_norm(config, "layer", size, 1e-5, "encoder.layer_norm")

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [E, C] from `input_features` [1, B, F]."""
        given, encoder = arrays[FEATURES], self.encoder
        wanted = (1, encoder.bins, 2 * encoder.length)
        if given.shape != wanted:
            raise ValidationError(f"a spectrogram must be {list(wanted)}, got {list(given.shape)}")
        x = yield from encoder.slices(self.to_device(given[0]), encoder.length)
        return Embeddings(self.norm(x))
