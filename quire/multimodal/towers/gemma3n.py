# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n's tower of sounds (Google, 2025): an encoder of a few rows a second, and as many embeddings for every sound.

Shapes: F frames of B bands, T rows of the encoder, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.norm import RMSNorm
from quire.models.json_object import JsonObject
from quire.multimodal.processors.usm import STRIDES, channels_of, pairs_of
from quire.multimodal.towers.base import Arrays, LearnedTable, Slices, Tower
from quire.multimodal.towers.usm import (
    ConformerShape,
    Convolution,
    CumulativeNorm,
    PartNames,
    PlainLinear,
    UsmEncoder,
    sizes_of,
)
from quire.worker.media_rows import Embeddings

_AT, _EMBEDDER = "audio_tower", "embed_audio"
_NAMES = PartNames(
    first="ffw_layer_start",
    last="ffw_layer_end",
    attention="attention.attn",
    relative="attention.attn.relative_position_embedding.pos_proj",
    post="attention.post",
    norm_before="attention.pre_attn_norm",
    norm_after="attention.post_norm",
    norm="norm",
)


def _encoder(tower: Tower, ears: JsonObject) -> UsmEncoder:
    channels, heads = sizes_of(ears, 1536, "conf_num_attention_heads")
    ears.only("conf_attention_context_right", 0)
    shape = ConformerShape(
        channels=channels,
        heads=heads,
        taps=ears.integer("conf_conv_kernel_size", 5),
        reach=ears.integer("conf_attention_context_left", 13),
        cap=ears.number("conf_attention_logit_cap", 50.0, low=1e-6),
        limit=ears.number("gradient_clipping", 1e10),
        residual_weight=ears.number("conf_residual_weight", 0.5),
        eps=ears.number("rms_norm_eps", 1e-6),
        key_scale=1.0,
        activate=partial(ops.activate, function="silu"),
        make=partial(PlainLinear, tower),
        names=_NAMES,
    )
    at = f"{_AT}.subsample_conv_projection"
    through = (1, *channels_of(ears, "sscp_conv_channel_size"))
    kernels, strides = (
        pairs_of(ears, f"sscp_conv_{key}_size", usual)
        for key, usual in (("kernel", ((3, 3), (3, 3))), ("stride", STRIDES))
    )
    eps = ears.number("sscp_conv_group_norm_eps", 1e-3)
    convolutions = [
        Convolution(
            tower,
            (through[number], through[number + 1]),
            CumulativeNorm(tower, through[number + 1], eps, f"{at}.conv_{number}.norm"),
            f"{at}.conv_{number}",
            kernel=kernels[number],
            stride=strides[number],
            before=0,
        )
        for number in range(2)
    ]
    blocks = [f"{_AT}.conformer.{number}" for number in range(ears.integer("conf_num_hidden_layers", 12))]
    bands = ears.integer("input_feat_size", 128)
    return UsmEncoder(tower, shape, convolutions, bands, blocks, f"{at}.input_proj_linear")


class Gemma3nEmbedder(Module):
    """Norm, linear layer and norm that turn rows into embeddings, and the embedding of what a sound lacks."""

    def __init__(self, tower: Tower, whole: JsonObject) -> None:
        super().__init__()
        ears, config = whole.child("audio_config"), tower.config
        size, dtype = ears.integer("hidden_size", 1536), activation_dtype(config)
        eps, count = ears.number("rms_norm_eps", 1e-6), ears.integer("vocab_size", 128)
        last = whole.child("text_config").integer("vocab_size", 262400) - 1
        self.filler = last - ears.integer("vocab_offset", 262272)
        if not 0 <= self.filler < count:
            raise ears.unsupported("vocab_offset", f"such that token {last} is one of {count} from there on")
        self.table = LearnedTable(count, size, config=config, name=f"{_EMBEDDER}.embedding", suffix=".weight")
        self.hard_norm, self.soft_norm = (
            RMSNorm(size=size, eps=eps, dtype=dtype, name=f"{_EMBEDDER}.{each}_embedding_norm")
            for each in ("hard", "soft")
        )
        self.projection = PlainLinear(tower, size, tower.hidden_size, f"{_EMBEDDER}.embedding_projection")
        self.norm = RMSNorm(
            size=tower.hidden_size, eps=eps, dtype=dtype, has_weight=False, name=f"{_EMBEDDER}.norm"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rows x [T, C] -> [T, H]."""
        out: Tensor = self.norm(self.projection(self.soft_norm(x)))
        return out

    def filling(self) -> Tensor:
        """Return the embedding [1, H] in place of rows that a sound does not have."""
        rows = self.table.weight[self.filler : self.filler + 1]
        out: Tensor = self.norm(self.projection(self.hard_norm(rows)))
        return out


class Gemma3nTower(Tower):
    """Tower of Gemma 3n's sounds; that of its images is not computed."""

    parts = (f"{_AT}.", f"{_EMBEDDER}.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        ears = whole.child("audio_config")
        self.count = whole.integer("audio_soft_tokens_per_image", 188)
        self.every = ears.integer("conf_reduction_factor", 4)
        self.encoder = _encoder(self, ears)
        self.embedder = Gemma3nEmbedder(self, whole)

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [m, H] from a spectrogram [1, F, B]."""
        rows = yield from self.encoder.slices(self.encoder.features(self, arrays))
        found = self.embedder(rows[:: self.every].contiguous())
        missing = self.count - len(found)
        if missing < 0:
            raise ValidationError(f"a sound has {len(found)} embeddings, the limit is {self.count}")
        return Embeddings(torch.cat((found, self.embedder.filling().expand(missing, -1))))
