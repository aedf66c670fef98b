# SPDX-License-Identifier: Apache-2.0
"""Encoders of text: BART's (Lewis et al., 2019, arXiv:1910.13461) and its relatives', and T5's (Raffel et al., 2020,
arXiv:1910.10683).

An encoder has the options of its decoder (`quire.models.families.bart`, `t5`), and sizes of its own.

Shapes: E tokens of one text or several, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError, ValidationError
from quire.kernels import ops
from quire.layers.activation import PLAIN
from quire.layers.base import activation_dtype
from quire.layers.embedding import SinusoidalEmbedding, VocabEmbedding
from quire.layers.relative_bias import RelativeBias
from quire.models.json_object import JsonObject
from quire.multimodal.towers.base import LENGTHS, TOKEN_IDS, Arrays, LearnedTable, Slices, Tower, sequences
from quire.multimodal.towers.block import BlockShape, TowerBlock, tower_norm
from quire.worker.media_rows import Embeddings


class TextTower(Tower):
    """Token embedding, blocks and a final norm.

    Invariant: rows depend on a text's tokens alone. On a CPU every operation gives a row the same bits among any
    others, so short texts are computed together; elsewhere one at a time.
    """

    parts: tuple[str, ...] = ("encoder.",)
    unused: tuple[str, ...] = (r"(^|\.)embed_positions\.weights?$", r"(^|\.)(encoder|decoder)\.version$")
    norm_name = "encoder.layer_norm"

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        arch = config.arch
        self.vocab_size = whole.integer("vocab_size")
        has_own = "embed_tokens" not in arch.names.renamed
        self.also_tables = ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
        self.embed_tokens = VocabEmbedding(
            vocab_size=self.vocab_size,
            size=self.hidden_size,
            dtype=self.dtype,
            scale=arch.embedding_multiplier,
            out_dtype=activation_dtype(config),
            name="encoder.embed_tokens" if has_own else "shared",
        )
        self.embed_positions = self._positions()
        self.embedding_norm = (
            tower_norm(config, arch.norm, self.hidden_size, arch.norm_eps, "encoder.layernorm_embedding")
            if arch.embedding_norm
            else None
        )
        self.layers = nn.ModuleList(self._blocks(whole))
        self.norm = (
            tower_norm(config, arch.norm, self.hidden_size, arch.norm_eps, self.norm_name)
            if arch.final_norm
            else None
        )

    def _positions(self) -> LearnedTable | SinusoidalEmbedding | None:
        """Return the rows that are added to token embeddings."""
        arch = self.config.arch
        if arch.positions is None:
            return None
        if arch.positions == "learned":
            rows = self.most_tokens + arch.position_offset
            name = "encoder.embed_positions"
            return LearnedTable(rows, self.hidden_size, config=self.config, name=name, suffix=".weight")
        return SinusoidalEmbedding(
            config=self.config,
            offset=arch.position_offset,
            through_last=arch.positions == "sinusoidal",
            num_rows=self.most_tokens,
        )

    def _blocks(self, whole: JsonObject) -> list[TowerBlock]:
        """Return the layers."""
        raise NotImplementedError

    def bias_of(self, layer: int) -> Tensor | None:
        """Return the relative bias of a layer's scores, as `ops.bidirectional_attention` takes it; None: none."""
        return None

    @property
    def most_tokens(self) -> int:
        """Longest text."""
        part_of = self.config.arch.part_of
        assert part_of is not None, "a tower belongs to a model"
        return part_of.encoder_length

    def shape(self, whole: JsonObject, heads: str, inner: str) -> BlockShape:
        """Return the blocks' sizes and options; `heads` and `inner` are keys of config.json."""
        arch = self.config.arch
        num_heads = whole.integer(heads)
        is_gated = arch.mlp == "gated"
        if self.hidden_size != whole.integer("d_model"):
            raise UnsupportedModelError(f"{whole.where}: the encoder and the decoder must have one size")
        return BlockShape(
            channels=self.hidden_size,
            heads=num_heads,
            head_dim=arch.head_dim if arch.relative_buckets else self.hidden_size // num_heads,
            inner=whole.integer(inner),
            eps=arch.norm_eps,
            activate=PLAIN[arch.hidden_act],
            norm=arch.norm,
            qkv_bias=arch.attention_bias,
            out_bias=arch.attention_out_bias,
            mlp_bias=arch.mlp_bias,
            gated=arch.hidden_act if is_gated else "",
            key_bias=True,
            norms=("self_attn_layer_norm", "final_layer_norm"),
            mlp=("fc1", "fc2"),
            norms_before=arch.do_layer_norm_before,
            scale=arch.attention_scale,
        )

    def joins(self, token_ids: Sequence[int]) -> bool:
        """See `Tower.joins`."""
        return self.device.type == "cpu" and self._takes(np.asarray(token_ids, dtype=np.int64))

    def _takes(self, ids: NDArray[np.int64]) -> bool:
        """Return whether these are the tokens of a text."""
        return 0 < len(ids) <= self.most_tokens and bool(((ids >= 0) & (ids < self.vocab_size)).all())

    def slices(self, arrays: Arrays) -> Slices:
        """Compute [E, C] from `token_ids` [E]."""
        return (yield from self.slices_of(arrays, None))

    def slices_of(self, arrays: Arrays, image: Tensor | None) -> Slices:
        """Compute [E, C] from `token_ids` [E] and the rows [m, C] of an image, if some of them take its place."""
        ids = np.asarray(arrays[TOKEN_IDS], dtype=np.int64)
        lengths = [int(length) for length in arrays.get(LENGTHS, (len(ids),))]
        for text in np.split(ids, np.cumsum(lengths)[:-1]):
            if not self._takes(text):
                raise ValidationError(
                    f"a text must have 1 to {self.most_tokens} tokens below {self.vocab_size}, got {len(text)}"
                )
        x = self._embedded(torch.from_numpy(ids).to(self.device), lengths, image)
        apart = sequences(lengths, x.device)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, TowerBlock)
            x = yield from layer.slices(x, apart, relative_bias=self.bias_of(number))
        return Embeddings(x if self.norm is None else self.norm(x))

    def token_rows(self, ids: Tensor, image: Tensor | None) -> Tensor:
        """Return the rows [E, C] of tokens [E] without positions."""
        rows: Tensor = self.embed_tokens(ids)
        return rows

    def _embedded(self, ids: Tensor, lengths: Sequence[int], image: Tensor | None) -> Tensor:
        x = self.token_rows(ids, image)
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        if isinstance(self.embed_positions, LearnedTable):
            x = x + ops.embedding(positions + self.config.arch.position_offset, self.embed_positions.weight)
        elif self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        return x if self.embedding_norm is None else self.embedding_norm(x)


class BartTower(TextTower):
    """Encoder of BART, mBART, Pegasus, Marian, M2M-100 and NLLB."""

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        if config.arch.positions == "learned":
            self.unused = TextTower.unused[1:]
        super().__init__(config=config, whole=whole)

    def _blocks(self, whole: JsonObject) -> list[TowerBlock]:
        shape = self.shape(whole, "encoder_attention_heads", "encoder_ffn_dim")
        return [
            TowerBlock(config=self.config, shape=shape, at=f"encoder.layers.{layer}")
            for layer in range(whole.integer("encoder_layers"))
        ]


class T5Tower(TextTower):
    """Encoder of T5, mT5 and UMT5: with a relative bias, of the first layer for all or of each."""

    norm_name = "encoder.final_layer_norm"

    def _blocks(self, whole: JsonObject) -> list[TowerBlock]:
        shape = self.shape(whole, "num_heads", "d_ff")
        shape = replace(
            shape,
            norms=("layer.0.layer_norm", "layer.1.layer_norm"),
            qkv="layer.0.SelfAttention.q_k_v",
            out="layer.0.SelfAttention.o",
            mlp=(
                "layer.1.DenseReluDense.wi_0_wi_1" if shape.gated else "layer.1.DenseReluDense.wi",
                "layer.1.DenseReluDense.wo",
            ),
        )
        count = whole.integer("num_layers")
        self.biases = nn.ModuleList(
            self._bias(shape, layer) for layer in range(count if self.config.arch.relative_everywhere else 1)
        )
        return [
            TowerBlock(config=self.config, shape=shape, at=f"encoder.block.{layer}") for layer in range(count)
        ]

    def _bias(self, shape: BlockShape, layer: int) -> RelativeBias:
        arch = self.config.arch
        return RelativeBias(
            config=self.config,
            buckets=arch.relative_buckets,
            farthest=arch.relative_farthest,
            num_heads=shape.heads,
            longest=self.most_tokens,
            name=f"encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias",
        )

    def bias_of(self, layer: int) -> Tensor | None:
        """See `TextTower.bias_of`."""
        bias = self.biases[layer if len(self.biases) > 1 else 0]
        assert isinstance(bias, RelativeBias)
        return bias.table
