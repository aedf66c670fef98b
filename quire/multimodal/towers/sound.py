# SPDX-License-Identifier: Apache-2.0
"""Towers of Qwen2-Audio (Chu et al., 2024, arXiv:2407.10759) and Voxtral (Liu et al., 2025, arXiv:2507.13264).

Both are Whisper's encoder over a sound, and a projection.

Shapes: k windows of F frames of B mel bins, E = F / 2 rows of a window, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError, ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.sound import FRAMES, encoder_options, rows_of_frames
from quire.multimodal.towers.base import NO_STEP, Arrays, Projection, Slices, Tower, activation_of
from quire.multimodal.towers.block import tower_norm
from quire.multimodal.towers.whisper import FEATURES, SpectrogramEncoder
from quire.worker.media_rows import Embeddings

_AT, _ALONE = "audio_tower", "encoder"  # The latter in a checkpoint of Whisper.
PROJECTOR = "multi_modal_projector"


class SoundTower(Tower):
    """Encoder and the norm after it; subclasses project."""

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        options, names = encoder_options(whole), config.arch.part_of
        options.only("scale_embedding", False)
        at = _ALONE if names is not None and names.encoder_dir else _AT
        self.parts = (f"{at}.", f"{PROJECTOR}.")
        self.encoder = SpectrogramEncoder(self, options, at)
        self.norm = tower_norm(config, "layer", self.encoder.size, 1e-5, f"{at}.layer_norm")
        self.build(whole, options)

    def build(self, whole: JsonObject, options: JsonObject) -> None:
        """Make the projection."""
        raise NotImplementedError

    def features(self, arrays: Arrays) -> Any:
        """Return `input_features` [k, B, F']. Raises ValidationError if they are of another shape."""
        given, encoder = arrays[FEATURES], self.encoder
        if given.ndim != 3 or given.shape[1] != encoder.bins or not 0 < given.shape[2] <= 2 * encoder.length:
            raise ValidationError(
                f"a spectrogram must be [k, {encoder.bins}, 1 to {2 * encoder.length}], got {list(given.shape)}"
            )
        return given


class Qwen2AudioTower(SoundTower):
    """Qwen2-Audio: pairs of rows are averaged before the norm; a sound shorter than a window has fewer."""

    def build(self, whole: JsonObject, options: JsonObject) -> None:
        self.linear_out = self.linear(self.encoder.size, self.hidden_size, True, f"{PROJECTOR}.linear")

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from `input_features` [1, B, F'] and the number of frames that the sound has."""
        given = self.features(arrays)
        num_frames = int(arrays[FRAMES].reshape(-1)[0])
        rows, count = rows_of_frames(num_frames)
        if not 0 < num_frames <= given.shape[2] or count < 1:
            raise ValidationError(f"a sound of {num_frames} frames has no embedding")
        x = yield from self.encoder.slices(self.to_device(given[0]), rows)
        pairs = x[: 2 * count].view(count, 2, -1)
        x = self.norm((pairs[:, 0] + pairs[:, 1]) / 2)
        return Embeddings(self.linear_out(x, NO_STEP))


class VoxtralTower(SoundTower):
    """Voxtral: every window is encoded whole, and several rows together become one embedding."""

    def build(self, whole: JsonObject, options: JsonObject) -> None:
        self.width = options.integer("encoder_ffn_dim")
        encoder = self.encoder
        if self.width % encoder.size or encoder.length * encoder.size % self.width:
            raise UnsupportedModelError(
                f"{whole.where}: rows of {encoder.size} cannot be joined to rows of {self.width}"
            )
        self.projection = Projection(
            self.linear(self.width, self.hidden_size, False, f"{PROJECTOR}.linear_1"),
            self.linear(self.hidden_size, self.hidden_size, False, f"{PROJECTOR}.linear_2"),
            activation_of(whole, "projector_hidden_act", "gelu"),
        )

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from `input_features` [k, B, F]."""
        done = []
        for window in self.features(arrays):
            x = yield from self.encoder.slices(self.to_device(window), self.encoder.length)
            done.append(self.projection(self.norm(x).view(-1, self.width)))
            yield
        return Embeddings(torch.cat(done))
