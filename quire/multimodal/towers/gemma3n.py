# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n's tower (Google, 2025): an encoder of sounds with a few rows a second, and as many embeddings for every
sound; and one of images.

Shapes: F frames of B bands, T rows of the encoder, C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.kernels import ops
from quire.layers.base import Module, activation_dtype
from quire.layers.norm import RMSNorm
from quire.models.json_object import JsonObject
from quire.multimodal.processors.gemma3n import PIXEL_VALUES, sees
from quire.multimodal.processors.usm import STRIDES, channels_of, pairs_of
from quire.multimodal.towers.base import Arrays, LearnedTable, Rows, Slices, Tower
from quire.multimodal.towers.mobilenet import MobileNet
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
_EYES, _IMAGE_EMBEDDER = "vision_tower", "embed_vision"
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
    """Norm, linear layer and norm that turn an encoder's rows into embeddings.

    Args:
        options: the encoder's.
        size: channels of its rows.
    """

    def __init__(self, tower: Tower, options: JsonObject, size: int, at: str) -> None:
        super().__init__()
        eps, dtype = options.number("rms_norm_eps", 1e-6), activation_dtype(tower.config)
        self.soft_norm = RMSNorm(size=size, eps=eps, dtype=dtype, name=f"{at}.soft_embedding_norm")
        self.projection = PlainLinear(tower, size, tower.hidden_size, f"{at}.embedding_projection")
        self.norm = RMSNorm(size=tower.hidden_size, eps=eps, dtype=dtype, has_weight=False, name=f"{at}.norm")

    def forward(self, x: Tensor) -> Tensor:
        """Rows x [T, C] -> [T, H]."""
        out: Tensor = self.norm(self.projection(self.soft_norm(x)))
        return out


class Gemma3nSoundEmbedder(Gemma3nEmbedder):
    """Embedder of sounds, with the embedding of what a sound lacks."""

    def __init__(self, tower: Tower, whole: JsonObject) -> None:
        ears, config = whole.child("audio_config"), tower.config
        size, count = ears.integer("hidden_size", 1536), ears.integer("vocab_size", 128)
        super().__init__(tower, ears, size, _EMBEDDER)
        last = whole.child("text_config").integer("vocab_size", 262400) - 1
        self.filler = last - ears.integer("vocab_offset", 262272)
        if not 0 <= self.filler < count:
            raise ears.unsupported("vocab_offset", f"such that token {last} is one of {count} from there on")
        self.table = LearnedTable(count, size, config=config, name=f"{_EMBEDDER}.embedding", suffix=".weight")
        self.hard_norm = RMSNorm(
            size=size,
            eps=ears.number("rms_norm_eps", 1e-6),
            dtype=activation_dtype(config),
            name=f"{_EMBEDDER}.hard_embedding_norm",
        )

    def filling(self) -> Tensor:
        """Return the embedding [1, H] in place of rows that a sound does not have."""
        rows = self.table.weight[self.filler : self.filler + 1]
        out: Tensor = self.norm(self.projection(self.hard_norm(rows)))
        return out


class Gemma3nEyes(Module):
    """Encoder of images, and its embedder."""

    def __init__(self, tower: Tower, whole: JsonObject) -> None:
        super().__init__()
        eyes = whole.child("vision_config")
        size, count = eyes.integer("hidden_size", 2048), whole.integer("vision_soft_tokens_per_image", 256)
        self.scale = size**0.5
        self.encoder = MobileNet(tower, size, math.isqrt(count), f"{_EYES}.timm_model")
        self.embedder = Gemma3nEmbedder(tower, eyes, size, _IMAGE_EMBEDDER)

    def slices(self, pixels: Tensor) -> Rows:
        """Compute pixels [3, height, width] -> [m, H]."""
        rows = yield from self.encoder.slices(pixels)
        out: Tensor = self.embedder(rows * self.scale)
        return out


class Gemma3nTower(Tower):
    """Tower of Gemma 3n's sounds, and of its images if their encoder is MobileNet-v5."""

    parts: tuple[str, ...] = (f"{_AT}.", f"{_EMBEDDER}.")

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        ears = whole.child("audio_config")
        self.count = whole.integer("audio_soft_tokens_per_image", 188)
        self.every = ears.integer("conf_reduction_factor", 4)
        self.encoder = _encoder(self, ears)
        self.embedder = Gemma3nSoundEmbedder(self, whole)
        self.eyes: Gemma3nEyes | None = None
        if sees(whole):
            self.parts = (*self.parts, f"{_EYES}.", f"{_IMAGE_EMBEDDER}.")
            self.unused = (rf"^{_IMAGE_EMBEDDER}\.(embedding|hard_embedding_norm)\.",)
            self.eyes = Gemma3nEyes(self, whole)

    def slices(self, arrays: Arrays) -> Slices:
        if self.eyes is not None and PIXEL_VALUES in arrays:
            return Embeddings((yield from self.eyes.slices(self.to_device(arrays[PIXEL_VALUES])[0])))
        return Embeddings((yield from self._sound(arrays)))

    def _sound(self, arrays: Arrays) -> Rows:
        """Compute [m, H] from a spectrogram [1, F, B]."""
        rows = yield from self.encoder.slices(self.encoder.features(self, arrays))
        found = self.embedder(rows[:: self.every].contiguous())
        missing = self.count - len(found)
        if missing < 0:
            raise ValidationError(f"a sound has {len(found)} embeddings, the limit is {self.count}")
        return torch.cat((found, self.embedder.filling().expand(missing, -1)))
