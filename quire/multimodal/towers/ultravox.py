# SPDX-License-Identifier: Apache-2.0
"""Tower of Ultravox (Fixie AI, 2024): Whisper's encoder over a sound's own length, and a projection of stacked rows.

The formulas are those of fixie-ai/ultravox (`ultravox_model.py` of 0.5) for a sound alone. Windows after the first are
filled with frames of zeros there: no row attends to those, yet rows of them complete the last stack, as they do here.
The first window's last stack is completed by zeros.

Shapes: windows of F frames of B mel bins, E rows of the encoder, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.errors import ValidationError
from quire.layers.base import Module
from quire.models.json_object import JsonObject
from quire.multimodal.processors.sound import FEATURES, rows_of_frames
from quire.multimodal.processors.ultravox import embeddings_of_frames, stack_of
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    Slices,
    Tower,
    activation_of,
    chunks,
    gated_by_second,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.multimodal.towers.sound import PROJECTOR, SoundTower
from quire.worker.media_rows import Embeddings

EPS = 1e-6
GATED = "swiglu"
"""Activation whose first half is multiplied by SiLU of its second."""


class GatedProjector(Module):
    """Norm, linear layer, activation, linear layer: [m, K] -> [m, H]; a further norm is between them or last."""

    def __init__(self, tower: Tower, whole: JsonObject, inputs: int) -> None:
        super().__init__()
        config, inner = tower.config, whole.integer("hidden_size", 4096)
        is_gated = whole.text("projector_act", GATED) == GATED
        self.activate = gated_by_second if is_gated else activation_of(whole, "projector_act", GATED)
        middle = inner // 2 if is_gated else inner
        has_middle = whole.flag("projector_ln_mid", False)
        self.norm_in = tower_norm(config, "rms", inputs, EPS, f"{PROJECTOR}.ln_pre")
        self.first = tower.linear(inputs, inner, False, f"{PROJECTOR}.linear_1")
        self.norm_middle = (
            tower_norm(config, "rms", middle, EPS, f"{PROJECTOR}.ln_mid") if has_middle else None
        )
        self.second = tower.linear(middle, tower.hidden_size, False, f"{PROJECTOR}.linear_2")
        self.norm_out = (
            None if has_middle else tower_norm(config, "rms", tower.hidden_size, EPS, f"{PROJECTOR}.ln_post")
        )
        self.flops_per_row = 2.0 * (inputs * inner + middle * tower.hidden_size)

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Compute [m, K] -> [m, H]."""
        done = []
        for rows in chunks(len(x), self.flops_per_row):
            done.append(self._projected(x[rows]))
            yield
        return torch.cat(done)

    def _projected(self, x: Tensor) -> Tensor:
        x = self.activate(self.first(self.norm_in(x), NO_STEP))
        x = x if self.norm_middle is None else self.norm_middle(x)
        x = self.second(x, NO_STEP)
        return x if self.norm_out is None else self.norm_out(x)


class BlockProjector(Module):
    """Norm, linear layer, positions, blocks as the encoder's, norm, linear layer: [m, K] -> [m, H]."""

    def __init__(
        self, tower: Tower, whole: JsonObject, inputs: int, shape: BlockShape, num_positions: int
    ) -> None:
        super().__init__()
        config, size = tower.config, shape.channels
        self.norm_in = tower_norm(config, "rms", inputs, EPS, f"{PROJECTOR}.ln_pre")
        self.linear_in = tower.linear(inputs, size, True, f"{PROJECTOR}.linear_in")
        self.positions = LearnedTable(
            num_positions, size, config=config, name=f"{PROJECTOR}.embed_positions", suffix=".weight"
        )
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{PROJECTOR}.layers.{number}")
            for number in range(whole.integer("num_projector_layers"))
        )
        self.norm_out = tower_norm(config, "rms", size, EPS, f"{PROJECTOR}.ln_post")
        self.linear_out = tower.linear(size, tower.hidden_size, True, f"{PROJECTOR}.linear_out")

    def slices(self, x: Tensor) -> Generator[None, None, Tensor]:
        """Compute [m, K] -> [m, H]; all rows attend to one another."""
        x = self.linear_in(self.norm_in(x), NO_STEP) + self.positions.weight[: len(x)]
        yield
        together = sequences([len(x)], x.device)
        for block in self.blocks:
            assert isinstance(block, TowerBlock)
            x = yield from block.slices(x, together)
        out: Tensor = self.linear_out(self.norm_out(x), NO_STEP)
        return out


class UltravoxTower(SoundTower):
    """Encoder and projector; windows follow one another."""

    def build(self, whole: JsonObject, options: JsonObject) -> None:
        whole.only("audio_latency_block_size")
        options.only("model_type", "whisper")
        self.num_stacked, encoder = stack_of(whole), self.encoder
        inputs = self.num_stacked * encoder.size
        has_blocks = whole.integer("num_projector_layers", 0, low=0) > 0
        self.projector: GatedProjector | BlockProjector = (
            BlockProjector(self, whole, inputs, encoder.shape, encoder.length)
            if has_blocks
            else GatedProjector(self, whole, inputs)
        )

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from `input_features` [1, B, F] of any length."""
        given, window = arrays[FEATURES], 2 * self.encoder.length
        if given.ndim != 3 or len(given) != 1 or given.shape[1] != self.encoder.bins or not given.shape[2]:
            raise ValidationError(
                f"a spectrogram must be [1, {self.encoder.bins}, frames], got {list(given.shape)}"
            )
        done = []
        for first in range(0, given.shape[2], window):
            stacked = yield from self._stacked(given[0, :, first : first + window], is_first=not first)
            done.append((yield from self.projector.slices(stacked)))
        return Embeddings(torch.cat(done))

    def _stacked(self, frames: NDArray[Any], *, is_first: bool) -> Generator[None, None, Tensor]:
        """Compute a window [B, F] -> rows of the encoder, as many as are stacked side by side."""
        encoder, (rows, _) = self.encoder, rows_of_frames(frames.shape[1])
        count = embeddings_of_frames(frames.shape[1], self.num_stacked)
        computed = rows if is_first else min(count * self.num_stacked, encoder.length)
        silence = 0 if is_first else 2 * computed - frames.shape[1]
        given = self.to_device(np.pad(frames, ((0, 0), (0, silence))))
        hidden = torch.arange(computed, device=given.device) >= rows if computed > rows else None
        x = self.norm((yield from encoder.slices(given, computed, hidden)))
        return F.pad(x, (0, 0, 0, count * self.num_stacked - computed)).view(count, -1)
