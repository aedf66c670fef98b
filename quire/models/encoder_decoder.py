# SPDX-License-Identifier: Apache-2.0
"""Decoder with cross-attention to an encoder's output, as Whisper has it (Radford et al., 2022, arXiv:2212.04356).

A sequence begins with P positions of the encoder's output, then come the decoder's tokens. Each layer has one cache: at
the first P positions it holds the keys and values of cross-attention, behind them those of self-attention. So blocks,
prefix caching, preemption and stores treat the encoder's output like any other prefix, and all requests with the same
input share it. P is a multiple of the block size; of the encoder's output E <= P rows are real.

Shapes: T tokens of the step, of which M are positions of encoders' output and D tokens of decoders; H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.layers.attention import Attention
from quire.layers.base import Layer, Module, activation_dtype, model_dtype, parameter
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear, UnbiasedKeyQKVLinear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import block_norm
from quire.layers.shard import Span
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head


class DecoderRows(NamedTuple):
    """Rows of a step by their kind, and what those of decoders attend to."""

    tokens: Tensor | None
    """[D] int64: rows of decoders' tokens; None: all rows are."""
    encoded: Tensor | None
    """[M] int64: rows of encoders' output; None: there are none."""
    own: StepContext
    """Step of the decoders' tokens alone, over the positions behind the encoder's output."""
    crossing: StepContext
    """Step of the same tokens over the encoder's output."""


def split_rows(
    positions: Tensor, step: StepContext, num_encoded: int, length: int, block_size: int
) -> DecoderRows:
    """Split a step's rows [T] into encoders' output and tokens.

    Args:
        num_encoded: P.
        length: E.
        block_size: tokens per block, which divides P.
    """
    metadata = step.metadata(0, AttentionMetadata)
    is_token = positions >= num_encoded
    num_tokens = int(is_token.sum())
    if num_tokens == len(positions):
        tokens = encoded = None
        starts, longest = metadata.query_start_loc, metadata.max_query_len
    else:
        tokens, encoded = is_token.nonzero().flatten(), (~is_token).nonzero().flatten()
        before = torch.zeros(len(positions) + 1, dtype=torch.int32, device=positions.device)
        before[1:] = is_token.cumsum(0)
        starts = before[metadata.query_start_loc.long()]
        longest = max(int((starts[1:] - starts[:-1]).max()), 1)
    num_blocks = num_encoded // block_size
    own = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=(metadata.seq_lens - num_encoded).clamp(min=0),
        block_tables=metadata.block_tables[:, num_blocks:].contiguous(),
        max_query_len=longest,
        max_seq_len=max(metadata.max_seq_len - num_encoded, 1),
        slot_mapping=metadata.slot_mapping if tokens is None else metadata.slot_mapping[tokens],
    )
    crossing = replace(
        own,
        seq_lens=torch.full_like(own.seq_lens, length),
        block_tables=metadata.block_tables[:, :num_blocks].contiguous(),
        max_seq_len=length,
        # A row of a longer query would see as many rows fewer as tokens follow it.
        last_seen=None
        if longest == 1
        else torch.full((num_tokens,), length - 1, dtype=torch.int32, device=positions.device),
    )
    adapters = step.adapter_rows
    alone = StepContext((own,), adapters if adapters is None or tokens is None else adapters[tokens])
    return DecoderRows(tokens, encoded, alone, replace(alone, groups=(crossing,)))


class LearnedPositions(Layer):
    """Learned rows of the decoder's positions, which begin behind the encoder's output."""

    def __init__(self, *, config: EngineConfig, first: int, name: str) -> None:
        super().__init__(name)
        arch = config.arch
        self.first = first
        self.weight = parameter(
            arch.max_position_embeddings - first, arch.hidden_size, dtype=activation_dtype(config)
        )

    def forward(self, positions: Tensor) -> Tensor:
        """positions [D] -> [D, H]."""
        return ops.embedding(positions - self.first, self.weight)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class JointAttention(Attention):
    """Cache of a layer's self-attention and cross-attention, and attention over either part of it."""

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        return "rows of an encoder's output are told from tokens by their positions, which is not captured"


class SelfProjections(Module):
    """Projections of self-attention, by the checkpoint's names."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        self.qkv_proj = UnbiasedKeyQKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=True,
            dtype=model_dtype(config),
            name=f"{prefix}.qkv_proj",
        )
        self.out_proj = _projection(config, f"{prefix}.out_proj", partition="input")


class CrossProjections(Module):
    """Projections of cross-attention, by the checkpoint's names."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        self.q_proj = _projection(config, f"{prefix}.q_proj")
        self.k_proj = _projection(config, f"{prefix}.k_proj", bias=False)
        self.v_proj = _projection(config, f"{prefix}.v_proj")
        self.out_proj = _projection(config, f"{prefix}.out_proj", partition="input")


def _projection(config: EngineConfig, name: str, *, partition: str = "output", bias: bool = True) -> Linear:
    arch = config.arch
    wide = arch.num_heads * arch.head_dim
    is_out = partition == "input"
    return Linear(
        in_features=wide if is_out else arch.hidden_size,
        out_features=arch.hidden_size if is_out else wide,
        bias=bias,
        dtype=model_dtype(config),
        name=name,
        partition="input" if is_out else "output",
        spans=() if is_out else (Span(arch.num_heads, arch.head_dim),),
    )


class CrossingBlock(Module):
    """Layer of a decoder: self-attention, cross-attention and a plain MLP, each behind a norm."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        self.head_dim = arch.head_dim
        self.self_attn = SelfProjections(config=config, prefix=f"{prefix}.self_attn")
        self.encoder_attn = CrossProjections(config=config, prefix=f"{prefix}.encoder_attn")
        self.attention = JointAttention(
            config=config,
            name=f"{prefix}.attention",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
        )
        self.self_attn_layer_norm = block_norm(config, f"{prefix}.self_attn_layer_norm")
        self.encoder_attn_layer_norm = block_norm(config, f"{prefix}.encoder_attn_layer_norm")
        self.final_layer_norm = block_norm(config, f"{prefix}.final_layer_norm")
        self.mlp = PlainMLP(config=config, prefix=f"{prefix}.mlp")

    def store(self, encoded: Tensor, slots: Tensor, step: StepContext) -> None:
        """Write the keys and values of an encoder's output [M, H] to slots [M] of the cache."""
        k, v = self.encoder_attn.k_proj(encoded, step), self.encoder_attn.v_proj(encoded, step)
        self.attention.store(self._heads(k), self._heads(v), slots)

    def forward(self, x: Tensor, positions: Tensor, rows: DecoderRows) -> Tensor:
        """x [D, H] of decoders' tokens -> [D, H]."""
        own, attention = rows.own, self.attention
        q, k, v = self.self_attn.qkv_proj.heads(self.self_attn_layer_norm(x), own)
        x = x + self.self_attn.out_proj(attention(q, k, v, positions, own), own)
        q = self._heads(self.encoder_attn.q_proj(self.encoder_attn_layer_norm(x), own))
        x = x + self.encoder_attn.out_proj(attention.attend(q, rows.crossing), own)
        out: Tensor = x + self.mlp(self.final_layer_norm(x), own)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.head_dim)


class CrossingDecoder(Module):
    """Embeddings, layers and final norm of a decoder with cross-attention.

    Raises:
        ConfigError: blocks of the cache do not divide the positions of the encoder's output.
    """

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        assert arch.part_of is not None, "a decoder with cross-attention belongs to an encoder"
        self.num_encoded, self.length = arch.part_of.encoder_positions, arch.part_of.encoder_length
        self.block_size = config.cache.block_size
        if self.num_encoded % self.block_size:
            raise ConfigError(
                f"--block-size is {self.block_size}, and must divide the {self.num_encoded} positions of the "
                "encoder's output: give 16, 32 or 64"
            )
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = LearnedPositions(
            config=config, first=self.num_encoded, name=f"{prefix}.embed_positions"
        )
        self.layers = nn.ModuleList(
            CrossingBlock(config=config, prefix=f"{prefix}.layers.{layer}")
            for layer in range(arch.num_layers)
        )
        self.layer_norm = block_norm(config, f"{prefix}.layer_norm")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Return hidden states [T, H]: 0 in rows of an encoder's output."""
        rows = split_rows(positions, step, self.num_encoded, self.length, self.block_size)
        if rows.encoded is not None:
            self._store(rows.encoded, step)
        if rows.tokens is None:
            return self._decode(inputs, positions, rows)
        hidden = torch.zeros(
            len(inputs),
            self.embed_positions.weight.shape[1],
            dtype=self.embed_positions.weight.dtype,
            device=inputs.device,
        )
        if len(rows.tokens):
            hidden[rows.tokens] = self._decode(inputs[rows.tokens], positions[rows.tokens], rows)
        return hidden

    def _blocks(self) -> Iterator[CrossingBlock]:
        return (layer for layer in self.layers if isinstance(layer, CrossingBlock))

    def _decode(self, inputs: Tensor, positions: Tensor, rows: DecoderRows) -> Tensor:
        x = self.embed_tokens(inputs, rows.own.adapter_rows) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, positions, rows)
        hidden: Tensor = self.layer_norm(x)
        return hidden

    def _store(self, encoded: Tensor, step: StepContext) -> None:
        """Write the cache of rows [M] of encoders' output; rows without an embedding count as 0."""
        slots = step.metadata(0, AttentionMetadata).slot_mapping
        weight = self.embed_positions.weight
        values = torch.zeros(len(slots), weight.shape[1], dtype=weight.dtype, device=weight.device)
        if step.media is not None:
            values[step.media.rows] = step.media.values.to(weight.dtype)
        of_rows = StepContext((), None if step.adapter_rows is None else step.adapter_rows[encoded])
        for layer in self._blocks():
            layer.store(values[encoded], slots[encoded], of_rows)


class EncoderDecoder(CausalLM):
    """Decoder with its output head; the encoder is a tower of `quire.multimodal`."""

    takes_media = True

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        names = config.arch.names
        self.merged, self.renamed, self.unused = names.merged, names.renamed, names.unused
        self.model = CrossingDecoder(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        hidden: Tensor = self.model(inputs, positions, step)
        return hidden
