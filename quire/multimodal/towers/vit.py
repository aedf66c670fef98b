# SPDX-License-Identifier: Apache-2.0
"""Towers on vision transformers with learned positions: CLIP, SigLIP and InternViT, with each family's projection.

LLaVA (Liu et al., 2023, arXiv:2310.03744), PaliGemma (2024, arXiv:2407.07726) and PaliGemma 2 (2024, arXiv:2412.03555),
Gemma 3 (2025, arXiv:2503.19786), Idefics 3 (2024, arXiv:2408.12637) and
SmolVLM (2025, arXiv:2504.05299), InternVL 3 (2025, arXiv:2504.10479).

Shapes: t tiles of n patches (and perhaps a class token), C channels, m embeddings, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ValidationError
from quire.layers.base import activation_dtype
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.slot import Slot
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import (
    NO_STEP,
    Arrays,
    LearnedTable,
    PatchLinear,
    Projection,
    Slices,
    Tower,
    activation_of,
    merged_squares,
    sequences,
)
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings


@dataclass(frozen=True)
class ViTOptions:
    """Options in which vision transformers differ; names are those of checkpoints, within the tower."""

    sizes: tuple[int, int, int, int, int, int]
    """Usual hidden size, intermediate size, layers, heads, image size and patch size, for files that omit them."""
    activation: str
    patch: str = "embeddings.patch_embedding"
    patch_bias: bool = True
    class_token: str = ""
    """Name of the token before the patches; empty: there is none."""
    class_shape: tuple[int, ...] = ()
    """Leading dimensions of that tensor in the checkpoint."""
    second_token: str = ""
    """Name of a token behind it, of the same shape; empty: there is none."""
    positions: str = "embeddings.position_embedding"
    positions_suffix: str = ".weight"
    pre_norm: str = ""
    post_norm: str = ""
    layers: str = "encoder.layers"
    eps: float = 1e-6
    """Usual epsilon of norms."""
    block: tuple[tuple[str, Any], ...] = ()
    """Fields of `BlockShape` that differ from its defaults."""


CLIP = ViTOptions(
    (768, 3072, 12, 12, 224, 32),
    "quick_gelu",
    patch_bias=False,
    class_token="embeddings.class_embedding",
    pre_norm="pre_layrnorm",
    eps=1e-5,
)
SIGLIP = ViTOptions((768, 3072, 12, 12, 224, 16), "gelu_pytorch_tanh", post_norm="post_layernorm")
IDEFICS3 = ViTOptions((1152, 3072, 12, 16, 224, 32), "gelu_pytorch_tanh", post_norm="post_layernorm")
INTERN = ViTOptions(
    (1024, 4096, 24, 16, 448, 14),
    "gelu",
    patch="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    class_shape=(1, 1),
    positions="embeddings.position_embeddings",
    positions_suffix="",
    layers="encoder.layer",
    block=(
        ("scaled", True),
        ("norms", ("layernorm_before", "layernorm_after")),
        ("qkv", "attention.qkv_proj"),
        ("out", "attention.projection_layer"),
    ),
)
VIT = ViTOptions(
    (768, 3072, 12, 12, 224, 16),
    "gelu",
    patch="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    class_shape=(1, 1),
    positions="embeddings.position_embeddings",
    positions_suffix="",
    post_norm="layernorm",
    layers="encoder.layer",
    eps=1e-12,
    block=(
        ("norms", ("layernorm_before", "layernorm_after")),
        ("qkv", "attention.attention.query_key_value"),
        ("out", "attention.output.dense"),
        ("mlp", ("intermediate.dense", "output.dense")),
    ),
)
DEIT = replace(VIT, second_token="embeddings.distillation_token")
_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)


def _size(config: JsonObject, key: str, usual: int) -> int:
    """Return a size that some files give for both sides."""
    value = config.get(key)
    return int(value[0]) if isinstance(value, list) and value else config.integer(key, usual)


class VisionTransformer(nn.Module):
    """Patches, positions and blocks up to the last one that is read.

    Args:
        reads: numbers of the hidden states that are read, negative ones from the end: 0 are the embeddings, and i the
            output of i blocks.
    """

    def __init__(
        self, tower: ViTTower, options: ViTOptions, eyes: JsonObject, reads: tuple[int, ...], at: str
    ) -> None:
        super().__init__()
        config = tower.config
        size, inner, depth, heads, image, patch = (
            _size(eyes, key, usual) for key, usual in zip(_KEYS, options.sizes, strict=True)
        )
        self.patch_size, self.side = patch, image // patch
        self.reads = tuple(depth + 1 + read if read < 0 else read for read in reads)
        self.depth = max(self.reads)
        first_tokens = [name for name in (options.class_token, options.second_token) if name]
        colors = eyes.integer("num_channels", 3)
        self.patch = PatchLinear(
            patch=(colors, patch, patch),
            outputs=size,
            bias=options.patch_bias,
            dtype=tower.dtype,
            name=f"{at}.{options.patch}",
        )
        self.pre_norm = self.post_norm = None
        stored = (*options.class_shape, size)
        self.first_tokens = nn.ModuleList(
            LearnedTable(size, config=config, name=f"{at}.{name}", stored=stored) for name in first_tokens
        )
        count = self.side**2 + len(first_tokens)
        self.positions = LearnedTable(
            count,
            size,
            config=config,
            name=f"{at}.{options.positions}",
            suffix=options.positions_suffix,
            stored=(count, size) if options.positions_suffix else (1, count, size),
        )
        eps = eyes.number("layer_norm_eps", options.eps)
        if options.pre_norm:
            self.pre_norm = tower_norm(config, "layer", size, eps, f"{at}.{options.pre_norm}")
        if options.post_norm and tower.is_normed:
            self.post_norm = tower_norm(config, "layer", size, eps, f"{at}.{options.post_norm}")
        more = dict(options.block)
        if options is INTERN:
            more["norm"] = "rms" if eyes.text("norm_type", "layer_norm") == "rms_norm" else "layer"
            more["qkv_bias"] = eyes.flag("attention_bias", False)
            more["qk_norm"] = eyes.flag("use_qk_norm", False)
        if options in (VIT, DEIT):
            more["qkv_bias"] = eyes.flag("qkv_bias", True)
        shape = BlockShape(
            channels=size,
            heads=heads,
            head_dim=size // heads,
            inner=inner,
            eps=eps,
            activate=activation_of(eyes, "hidden_act", options.activation),
            **more,
        )
        self.channels = size
        self.blocks = nn.ModuleList(
            TowerBlock(config=config, shape=shape, at=f"{at}.{options.layers}.{number}")
            for number in range(self.depth)
        )
        unread = "|".join(str(number) for number in range(self.depth, depth))
        self.unused: tuple[str, ...] = (rf"^{at}\.{options.layers}\.({unread})\.",) if unread else ()
        ends = "head|pooler" if self.post_norm is not None else "head|pooler|post_layernorm"
        self.unused += (rf"^{at}\.({ends})\.", r"\.(position_ids|mask_token)$")

    def slices(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """pixels [t, 3, rows, columns] -> [t, n, C], or with several `reads` [t, n, C * reads]."""
        embedded = []
        for tile in pixels:
            embedded.append(self._embedded(tile[None]))
            yield
        x = torch.cat(embedded)
        tiles, per_tile, _ = x.shape
        stream, metadata = x.flatten(0, 1), sequences([per_tile] * tiles, x.device)
        found = {0: stream}
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, TowerBlock)
            stream = yield from block.slices(stream, metadata)
            if number in self.reads:
                found[number] = stream
        if self.post_norm is not None:
            found[self.depth] = self.post_norm(stream)
        read = torch.cat([found[number] for number in self.reads], -1)
        return read.view(tiles, per_tile, -1)

    def _embedded(self, pixels: Tensor) -> Tensor:
        tiles, colors, height, width = pixels.shape
        size = self.patch_size
        rows, columns = height // size, width // size
        if height % size or width % size:
            raise ValidationError(f"an image of {height} x {width} pixels has no whole patches of {size}")
        patches = pixels.view(tiles, colors, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
        found: Tensor = self.patch(patches.reshape(tiles * rows * columns, -1), NO_STEP)
        x = found.view(tiles, rows * columns, -1)
        for token in reversed(self.first_tokens):
            assert isinstance(token, LearnedTable)
            x = torch.cat((token.weight.expand(tiles, 1, -1), x), 1)
        x = x + self._positions(rows, columns)
        if self.pre_norm is None:
            return x
        normed: Tensor = self.pre_norm(x.flatten(0, 1))
        return normed.view_as(x)

    def _positions(self, rows: int, columns: int) -> Tensor:
        table = self.positions.weight
        if (rows, columns) != (self.side, self.side):
            raise ValidationError(
                f"the encoder takes {self.side} x {self.side} patches, and the image has {rows} x {columns}"
            )
        return table


class ViTTower(Tower):
    """Vision transformer and a projection of its patches."""

    options: ViTOptions = SIGLIP
    tower_name = "vision_tower"
    is_normed = False
    """The encoder's last norm is applied before the projection."""

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        self.eyes = whole.child("vision_config")
        self.vision = VisionTransformer(self, self._options(), self.eyes, self._reads(whole), self.tower_name)
        self.unused = self.vision.unused
        self.build(whole)

    def _options(self) -> ViTOptions:
        return self.options

    def _reads(self, whole: JsonObject) -> tuple[int, ...]:
        """Return the hidden states that the projection reads."""
        return (-1,)

    def build(self, whole: JsonObject) -> None:
        """Make the projection."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """Hidden states [t, n, C] -> embeddings [m, H]."""
        raise NotImplementedError

    def pixels(self, arrays: Arrays) -> Tensor:
        """Return [t, 3, rows, columns]."""
        return self.to_device(arrays["pixel_values"])

    def slices(self, arrays: Arrays) -> Slices:
        x = yield from self.vision.slices(self.pixels(arrays))
        yield
        return Embeddings(self.project(x))


def feature_layers(whole: JsonObject, default: int) -> tuple[int, ...]:
    """Return `vision_feature_layer`, one number or several."""
    value = whole.get("vision_feature_layer")
    if value is None:
        return (default,)
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(type(number) is not int for number in numbers):
        raise whole.wrong("vision_feature_layer", "a number or a list of numbers")
    return tuple(numbers)


class LlavaTower(ViTTower):
    """LLaVA 1.5: an inner layer's patches of CLIP or SigLIP, through two linear layers."""

    def _options(self) -> ViTOptions:
        kinds = {"clip_vision_model": CLIP, "siglip_vision_model": SIGLIP}
        return kinds[self.eyes.choice("model_type", tuple(kinds), "clip_vision_model")]

    def _reads(self, whole: JsonObject) -> tuple[int, ...]:
        return feature_layers(whole, -2)

    def build(self, whole: JsonObject) -> None:
        strategy = whole.choice("vision_feature_select_strategy", ("default", "full"), "default")
        self.drops_first = strategy == "default"
        bias = whole.flag("multimodal_projector_bias", True)
        size = self.vision.channels * len(self.vision.reads)
        self.projection = Projection(
            self.linear(size, self.hidden_size, bias, "multi_modal_projector.linear_1"),
            self.linear(self.hidden_size, self.hidden_size, bias, "multi_modal_projector.linear_2"),
            activation_of(whole, "projector_hidden_act", "gelu"),
        )

    def project(self, x: Tensor) -> Tensor:
        patches = x[:, 1:] if self.drops_first else x
        out: Tensor = self.projection(patches.flatten(0, 1).contiguous())
        return out


class InternVLTower(ViTTower):
    """InternVL: squares of InternViT's patches through a norm and two linear layers, tile after tile."""

    options = INTERN

    def _reads(self, whole: JsonObject) -> tuple[int, ...]:
        return feature_layers(whole, -1)

    def build(self, whole: JsonObject) -> None:
        if not self.eyes.flag("use_mean_pooling", True):
            raise self.eyes.unsupported("use_mean_pooling", "true, so that the encoder ends without a norm")
        self.square = int(1 / whole.number("downsample_ratio", 0.5))
        strategy = whole.choice("vision_feature_select_strategy", ("default", "full"), "default")
        self.drops_first = strategy == "default"
        size = self.vision.channels * self.square**2
        self.projection = Projection(
            self.linear(size, self.hidden_size, True, "multi_modal_projector.linear_1"),
            self.linear(self.hidden_size, self.hidden_size, True, "multi_modal_projector.linear_2"),
            activation_of(whole, "projector_hidden_act", "gelu"),
            LayerNorm(
                size=size,
                eps=1e-5,
                dtype=activation_dtype(self.config),
                name="multi_modal_projector.layer_norm",
            ),
        )

    def project(self, x: Tensor) -> Tensor:
        patches = x[:, 1:] if self.drops_first else x
        side = self.vision.side
        squares = [merged_squares(tile.contiguous(), side, side, self.square) for tile in patches]
        out: Tensor = self.projection(torch.cat(squares))
        return out


class Idefics3Tower(ViTTower):
    """Idefics 3 and SmolVLM: squares of SigLIP's patches through one linear layer, tile after tile."""

    options = IDEFICS3
    is_normed = True
    tower_name = "vision_model"
    parts = ("vision_model.", "connector.")

    def build(self, whole: JsonObject) -> None:
        self.square = whole.integer("scale_factor", 2)
        size = self.vision.channels * self.square**2
        self.projection = self.linear(size, self.hidden_size, False, "connector.modality_projection.proj")

    def pixels(self, arrays: Arrays) -> Tensor:
        """Return the tiles, which the processor has in a batch of one image."""
        pixels = self.to_device(arrays["pixel_values"])
        return pixels.flatten(0, 1) if pixels.dim() == 5 else pixels

    def project(self, x: Tensor) -> Tensor:
        side = self.vision.side
        squares = torch.cat([merged_squares(tile, side, side, self.square) for tile in x])
        out: Tensor = self.projection(squares, NO_STEP)
        return out


class PaliGemmaTower(ViTTower):
    """PaliGemma: SigLIP's patches through one linear layer."""

    is_normed = True

    def build(self, whole: JsonObject) -> None:
        size = self.vision.channels
        self.projection = self.linear(size, self.hidden_size, True, "multi_modal_projector.linear")

    def project(self, x: Tensor) -> Tensor:
        out: Tensor = self.projection(x.flatten(0, 1).contiguous(), NO_STEP)
        return out


class StoredProjection(Linear):
    """Linear layer whose weight [K, N] the checkpoint has beside other tensors, as `mm_input_projection_weight`."""

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(names):
            yield name.removesuffix(".weight") + "_weight", slot


class Gemma3Tower(ViTTower):
    """Gemma 3: averages of squares of SigLIP's patches, normed, through one matrix."""

    is_normed = True

    def build(self, whole: JsonObject) -> None:
        at = "multi_modal_projector"
        side = int(whole.integer("mm_tokens_per_image", 256) ** 0.5)
        self.square = self.vision.side // side
        size = self.vision.channels
        self.norm = RMSNorm(
            size=size,
            eps=self.eyes.number("layer_norm_eps", 1e-6),
            dtype=activation_dtype(self.config),
            offset=1.0,
            name=f"{at}.mm_soft_emb_norm",
        )
        self.projection = StoredProjection(
            in_features=size,
            out_features=self.hidden_size,
            bias=False,
            dtype=self.dtype,
            name=f"{at}.mm_input_projection",
            transposed=True,
        )

    def project(self, x: Tensor) -> Tensor:
        side = self.vision.side
        pictures = x.transpose(1, 2).reshape(len(x), -1, side, side)
        averages = F.avg_pool2d(pictures, self.square).flatten(2).transpose(1, 2)
        rows = averages.flatten(0, 1).contiguous()
        out: Tensor = self.projection(self.norm(rows), NO_STEP)
        return out


class EncoderTower(ViTTower):
    """Encoder of TrOCR: all rows of ViT or DeiT, projected if the decoder's size differs and it does not project."""

    tower_name = "encoder"
    parts = ("encoder.", "enc_to_dec_proj.")
    is_normed = True

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config, whole=whole.with_aliases({"vision_config": "encoder"}))

    def _options(self) -> ViTOptions:
        return DEIT if self.eyes.text("model_type") == "deit" else VIT

    def build(self, whole: JsonObject) -> None:
        size, wanted = self.vision.channels, self.config.arch.media_size
        self.projection = None if size == wanted else self.linear(size, wanted, True, "enc_to_dec_proj")

    def project(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.projection is None:
            return rows
        out: Tensor = self.projection(rows, NO_STEP)
        return out
