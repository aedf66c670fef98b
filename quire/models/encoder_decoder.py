# SPDX-License-Identifier: Apache-2.0
"""Decoder with cross-attention to an encoder's output (Vaswani et al., 2017, arXiv:1706.03762), as Whisper (Radford et
al., 2022, arXiv:2212.04356), T5 (Raffel et al., 2020, arXiv:1910.10683) and BART (Lewis et al., 2019, arXiv:1910.13461)
have it.

A sequence begins with P positions of the encoder's output, then come the decoder's tokens. Each layer has one cache: at
the first P positions it holds the keys and values of cross-attention, behind them those of self-attention. So blocks,
prefix caching, preemption and stores treat the encoder's output like any other prefix, and all requests with the same
input share it. Of a request's P positions E are rows of the output (`StepContext.encoded_lens`), and P is E rounded up
to whole blocks. Tokens are numbered from 0 behind it, so the positions of an encoder's output are below 0.

Shapes: T tokens of the step, of which M are rows of encoders' output and D tokens of decoders; R requests; H hidden
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import ENCODER_UNIT, encoder_positions
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.layers.attention import Attention
from quire.layers.base import Layer, Module, activation_dtype, model_dtype, parameter
from quire.layers.embedding import SinusoidalEmbedding, VocabEmbedding
from quire.layers.linear import Linear, QKVLinear, UnbiasedKeyQKVLinear
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import block_norm
from quire.layers.relative_bias import RelativeBias
from quire.layers.shard import ShardSpan
from quire.layers.slot import Slot, TensorPart
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head

_MLPS = {"plain": PlainMLP, "gated": GatedMLP}
LOGITS_BIAS = "final_logits_bias"


class DecoderRows(NamedTuple):
    """Rows of a step by their kind, and what those of decoders attend to."""

    tokens: Tensor | None
    """[D] int64: rows of decoders' tokens; None: all rows are."""
    own: StepContext
    """Step of the decoders' tokens alone, over the positions behind the encoder's output."""
    crossing: StepContext
    """Step of the same tokens over the encoder's output."""


def split_rows(
    positions: Tensor, step: StepContext, block_size: int, length: int | None = None
) -> DecoderRows:
    """Split a step's rows [T] into encoders' output and tokens.

    Args:
        block_size: tokens per block, which divides P.
        length: E, if it is the same for all requests.
    """
    if length is not None and step.encoded_lens is None:
        return _only_tokens(step, length, block_size)
    is_measured = step.media is None and step.encoded_lens is None
    if length is None and (is_measured or step.encoded_rows is not None):
        return _only_tokens_of_any_length(step, block_size)
    metadata = step.metadata(0, AttentionMetadata)
    tokens, starts, longest = _tokens(positions, metadata)
    lens = step.encoded_lens
    if lens is None:  # a step that is only measured
        lens = torch.zeros_like(metadata.seq_lens)
    firsts = (lens + (ENCODER_UNIT - 1)) // ENCODER_UNIT * ENCODER_UNIT
    own = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=(metadata.seq_lens - firsts).clamp(min=0),
        block_tables=_moved(metadata.block_tables, firsts // block_size),
        max_query_len=longest,
        max_seq_len=metadata.max_seq_len,
        slot_mapping=metadata.slot_mapping if tokens is None else metadata.slot_mapping[tokens],
    )
    adapters = step.adapter_rows
    alone = StepContext((own,), adapters if adapters is None or tokens is None else adapters[tokens])
    return DecoderRows(tokens, alone, replace(alone, groups=(_crossing(own, lens, metadata),)))


def _only_tokens(step: StepContext, length: int, block_size: int) -> DecoderRows:
    """Return the rows of a step without media, which are all of decoders.

    No value of a tensor is read, so that the operations can be recorded. The rows of a rehearsal, which no encoder's
    output precedes, have the blocks that they are given as either part.
    """
    metadata = step.metadata(0, AttentionMetadata)
    starts, tables, num_encoded = metadata.query_start_loc, metadata.block_tables, encoder_positions(length)
    num_blocks = num_encoded // block_size
    own = replace(
        metadata,
        seq_lens=torch.maximum(metadata.seq_lens - num_encoded, starts[1:] - starts[:-1]),
        # A clone, because a single row is contiguous already, and all sizes of a recorded step must copy alike.
        block_tables=tables[:, num_blocks:].clone(memory_format=torch.contiguous_format)
        if tables.shape[1] > num_blocks
        else tables,
        max_seq_len=max(metadata.max_seq_len - num_encoded, metadata.max_query_len),
    )
    seen = min(length, tables.shape[1] * block_size)
    crossing = replace(
        own,
        seq_lens=torch.full_like(own.seq_lens, seen),
        block_tables=tables,
        max_seq_len=seen,
        # A row of a longer query would see as many rows fewer as tokens follow it.
        last_seen=torch.full(
            (len(metadata.slot_mapping),), seen - 1, dtype=torch.int32, device=tables.device
        ),
    )
    alone = replace(step, groups=(own,))
    return DecoderRows(None, alone, replace(alone, groups=(crossing,)))


def _only_tokens_of_any_length(step: StepContext, block_size: int) -> DecoderRows:
    """Return the rows of a step that are all of decoders, behind encoders' outputs of any length, or of a step that is
    only measured.

    No value of a tensor is read, so that the operations can be recorded. Each row attends to the encoder's output as a
    request of its own, since a query may be longer than what it attends to; that gives the same bits.
    """
    metadata = step.metadata(0, AttentionMetadata)
    starts, tables = metadata.query_start_loc, metadata.block_tables
    num_rows = len(metadata.slot_mapping)
    lens, owners = step.encoded_lens, step.encoded_rows
    if lens is None or owners is None:
        lens = torch.zeros_like(metadata.seq_lens)
        owners = torch.zeros(num_rows, dtype=torch.int64, device=tables.device)
    # While a step is recorded, rows may name requests that a smaller size does not have.
    owners = owners.clamp(max=len(lens) - 1)
    firsts = (lens + (ENCODER_UNIT - 1)) // ENCODER_UNIT * ENCODER_UNIT
    own = replace(
        metadata,
        seq_lens=torch.maximum(metadata.seq_lens - firsts, starts[1:] - starts[:-1]),
        block_tables=_moved(tables, (firsts // block_size).long()),
    )
    crossing = replace(
        own,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=tables.device),
        seq_lens=lens.clamp(min=1).index_select(0, owners),
        block_tables=tables.index_select(0, owners),
        max_query_len=1,
    )
    alone = replace(step, groups=(own,))
    return DecoderRows(None, alone, replace(alone, groups=(crossing,)))


def _tokens(positions: Tensor, metadata: AttentionMetadata) -> tuple[Tensor | None, Tensor, int]:
    """Return the rows of tokens (None: all), where each request's begin, and the most of one request."""
    is_token = positions >= 0
    num_tokens = int(is_token.sum())
    if num_tokens == len(positions):
        return None, metadata.query_start_loc, metadata.max_query_len
    before = torch.zeros(len(positions) + 1, dtype=torch.int32, device=positions.device)
    before[1:] = is_token.cumsum(0)
    starts = before[metadata.query_start_loc.long()]
    return is_token.nonzero().flatten(), starts, max(int((starts[1:] - starts[:-1]).max()), 1)


def _moved(tables: Tensor, num_blocks: Tensor) -> Tensor:
    """Return block tables [R, B] without the first `num_blocks` [R] of each request; what follows them is not read."""
    width = tables.shape[1]
    places = num_blocks[:, None] + torch.arange(width, device=tables.device)
    return tables.gather(1, places.clamp(max=width - 1))


def _crossing(own: AttentionMetadata, lens: Tensor, whole: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of the decoders' tokens over E rows each, `lens` [R]."""
    lens, num_tokens = lens.clamp(min=1), len(own.slot_mapping)
    crossing = replace(own, seq_lens=lens, block_tables=whole.block_tables)
    if own.max_query_len == 1:
        return crossing
    counts = (own.query_start_loc[1:] - own.query_start_loc[:-1]).long()
    if own.max_query_len <= int(lens.min()):
        # A row of a longer query would see as many rows fewer as tokens follow it.
        return replace(crossing, last_seen=_of_rows(lens - 1, counts, num_tokens))
    # Queries longer than what they attend to are computed row by row, which gives the same bits.
    return replace(
        crossing,
        query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=lens.device),
        seq_lens=_of_rows(lens, counts, num_tokens),
        block_tables=_of_rows(whole.block_tables, counts, num_tokens),
        max_query_len=1,
    )


def _of_rows(of_requests: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """Repeat what each request has for each of its rows; rows of no request, which come last, have the last one's."""
    found = of_requests.repeat_interleave(counts, dim=0)
    missing = num_rows - len(found)
    return found if not missing else torch.cat((found, of_requests[-1:].repeat_interleave(missing, dim=0)))


class LearnedPositions(Layer):
    """Learned rows of the decoder's positions; the first `offset` rows of the table are unused."""

    def __init__(self, *, config: EngineConfig, offset: int, name: str) -> None:
        super().__init__(name)
        arch = config.arch
        assert arch.part_of is not None, "a decoder with cross-attention belongs to an encoder"
        self.offset = offset
        num_rows = arch.max_position_embeddings - arch.part_of.encoder_positions + offset
        self.weight = parameter(num_rows, arch.hidden_size, dtype=activation_dtype(config))

    def forward(self, positions: Tensor) -> Tensor:
        """positions [D] -> [D, H]."""
        # A step that is only measured has no encoder's output, and tokens at its positions.
        return ops.embedding((positions + self.offset).clamp(max=len(self.weight) - 1), self.weight)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


def _positions(config: EngineConfig, name: str) -> Module | None:
    """Return what is added to token embeddings for positions."""
    arch = config.arch
    if arch.positions is None:
        return None
    if arch.positions == "learned":
        return LearnedPositions(config=config, offset=arch.position_offset, name=name)
    through_last = arch.positions == "sinusoidal"
    return SinusoidalEmbedding(
        config=config, offset=arch.position_offset, through_last=through_last, name=name
    )


class JointAttention(Attention):
    """Cache of a layer's self-attention and cross-attention, and attention over either part of it."""

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        if self.k_cache.device.type != "cpu":
            return "a decoder behind an encoder is recorded on a CPU only"
        return super().why_not_captured()


class SelfProjections(Module):
    """Projections of self-attention, by the checkpoint's names, and its relative bias if the layer has one."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        arch = config.arch
        self.qkv_proj = (QKVLinear if arch.key_bias else UnbiasedKeyQKVLinear)(
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=arch.attention_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.qkv_proj",
        )
        self.out_proj = _projection(config, f"{prefix}.out_proj", arch.attention_out_bias, partition="input")
        self.relative_bias: RelativeBias | None = None
        if arch.relative_buckets and (arch.relative_everywhere or layer == 0):
            self.relative_bias = RelativeBias(
                config=config,
                buckets=arch.relative_buckets,
                causal=True,
                farthest=arch.relative_farthest,
                name=f"{prefix}.relative_bias",
            )


class CrossProjections(Module):
    """Projections of cross-attention, by the checkpoint's names."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        bias = arch.attention_bias
        self.q_proj = _projection(config, f"{prefix}.q_proj", bias)
        inputs = arch.media_size
        self.k_proj = _projection(config, f"{prefix}.k_proj", bias and arch.key_bias, inputs=inputs)
        self.v_proj = _projection(config, f"{prefix}.v_proj", bias, inputs=inputs)
        self.out_proj = _projection(config, f"{prefix}.out_proj", arch.attention_out_bias, partition="input")


def _projection(
    config: EngineConfig, name: str, bias: bool, *, partition: str = "output", inputs: int | None = None
) -> Linear:
    arch = config.arch
    wide = arch.num_heads * arch.head_dim
    is_out = partition == "input"
    return Linear(
        in_features=wide if is_out else inputs or arch.hidden_size,
        out_features=arch.hidden_size if is_out else wide,
        bias=bias,
        dtype=model_dtype(config),
        name=name,
        partition="input" if is_out else "output",
        spans=() if is_out else (ShardSpan(arch.num_heads, arch.head_dim),),
    )


def _length_of(config: EngineConfig) -> int | None:
    """Return E if it is the same for all requests, as a sound's; a text has as many rows as tokens."""
    part_of = config.arch.part_of
    assert part_of is not None, "a decoder with cross-attention belongs to an encoder"
    return None if part_of.reads_text else part_of.encoder_length


class CrossingBlock(Module):
    """Layer of a decoder: self-attention, cross-attention and an MLP, each with a norm before or after it."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        arch = config.arch
        self.head_dim = arch.head_dim
        self.norms_before = arch.do_layer_norm_before
        self.self_attn = SelfProjections(config=config, prefix=f"{prefix}.self_attn", layer=layer)
        self.encoder_attn = CrossProjections(config=config, prefix=f"{prefix}.encoder_attn")
        self.attention = JointAttention(
            config=config,
            name=f"{prefix}.attention",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale,
        )
        self.self_attn_layer_norm = block_norm(config, f"{prefix}.self_attn_layer_norm")
        self.encoder_attn_layer_norm = block_norm(config, f"{prefix}.encoder_attn_layer_norm")
        self.final_layer_norm = block_norm(config, f"{prefix}.final_layer_norm")
        self.mlp = _MLPS[arch.mlp](config=config, prefix=f"{prefix}.mlp")

    def store(self, encoded: Tensor, slots: Tensor, step: StepContext) -> None:
        """Write the keys and values of an encoder's output [M, H] to slots [M] of the cache."""
        k, v = self.encoder_attn.k_proj(encoded, step), self.encoder_attn.v_proj(encoded, step)
        self.attention.store(self._heads(k), self._heads(v), slots)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, rows: DecoderRows
    ) -> tuple[Tensor, Tensor | None]:
        """x [D, H] of decoders' tokens, and what is to be added to it (None: nothing) -> those of the next layer.

        A norm adds the two in its own pass. Norms after the sums leave nothing to be added.
        """
        parts = (
            (self.self_attn_layer_norm, lambda own: self._attended(own, positions, rows)),
            (self.encoder_attn_layer_norm, lambda own: self._crossed(own, rows)),
            (self.final_layer_norm, lambda own: self.mlp(own, rows.own)),
        )
        for norm, part in parts:
            if self.norms_before:
                x, residual = norm.add(x, residual)
                x = part(x)
            else:
                x, _ = norm.add(part(x), x)
        return x, residual

    def _attended(self, x: Tensor, positions: Tensor, rows: DecoderRows) -> Tensor:
        q, k, v = self.self_attn.qkv_proj.heads(x, rows.own)
        out: Tensor = self.self_attn.out_proj(self.attention(q, k, v, positions, rows.own), rows.own)
        return out

    def _crossed(self, x: Tensor, rows: DecoderRows) -> Tensor:
        q = self._heads(self.encoder_attn.q_proj(x, rows.own))
        attended = self.attention.attend(q, rows.crossing, biased=False)
        out: Tensor = self.encoder_attn.out_proj(attended, rows.own)
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
        self.block_size, self.size = config.cache.block_size, arch.hidden_size
        self.length = _length_of(config)
        if ENCODER_UNIT % self.block_size:
            raise ConfigError(
                f"--block-size is {self.block_size}, and must divide {ENCODER_UNIT}, of which the positions of an "
                "encoder's output are a multiple: give 16, 32 or 64"
            )
        self.dtype = activation_dtype(config)
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.embedding_multiplier,
            is_head=arch.tie_word_embeddings,
            out_dtype=self.dtype,
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = _positions(config, f"{prefix}.embed_positions")
        self.layernorm_embedding = (
            block_norm(config, f"{prefix}.layernorm_embedding") if arch.embedding_norm else None
        )
        self.layers = nn.ModuleList(
            CrossingBlock(config=config, prefix=f"{prefix}.layers.{layer}", layer=layer)
            for layer in range(arch.num_layers)
        )
        self._share_bias()
        self.layer_norm = block_norm(config, f"{prefix}.layer_norm") if arch.final_norm else None

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Return hidden states [T, H]: 0 in rows of an encoder's output."""
        rows = split_rows(positions, step, self.block_size, self.length)
        if step.media is not None:
            self._store(step)
        if rows.tokens is None:
            return self._decode(inputs, positions, rows)
        hidden = torch.zeros(len(inputs), self.size, dtype=self.dtype, device=inputs.device)
        if len(rows.tokens):
            hidden[rows.tokens] = self._decode(inputs[rows.tokens], positions[rows.tokens], rows)
        return hidden

    def _share_bias(self) -> None:
        """Give every layer its relative bias, or the first one's."""
        shared: RelativeBias | None = None
        for block in self._blocks():
            shared = block.self_attn.relative_bias or shared
            block.attention.relative_bias = shared

    def _blocks(self) -> Iterator[CrossingBlock]:
        return (layer for layer in self.layers if isinstance(layer, CrossingBlock))

    def embed(self, tokens: Tensor, positions: Tensor, adapter_rows: Tensor | None = None) -> Tensor:
        """Token ids [D] at positions [D] of the decoder, from 0 -> [D, H]."""
        x: Tensor = self.embed_tokens(tokens, adapter_rows)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        return x if self.layernorm_embedding is None else self.layernorm_embedding(x)

    def _decode(self, inputs: Tensor, positions: Tensor, rows: DecoderRows) -> Tensor:
        x = self.embed(inputs, positions, rows.own.adapter_rows)
        residual: Tensor | None = None
        for layer in self._blocks():
            x, residual = layer(x, residual, positions, rows)
        if self.layer_norm is not None:
            return self.layer_norm.add(x, residual)[0]
        return x if residual is None else x + residual

    def _store(self, step: StepContext) -> None:
        """Write the cache of the step's rows of encoders' output; positions up to P without a row are never read."""
        media, adapters = step.media, step.adapter_rows
        assert media is not None, "the caller has asked"
        slots = step.metadata(0, AttentionMetadata).slot_mapping[media.rows]
        values = media.values.to(self.dtype)
        of_rows = StepContext((), None if adapters is None else adapters[media.rows])
        for layer in self._blocks():
            layer.store(values, slots, of_rows)


class LogitsBias(Layer):
    """Bias of logits that a checkpoint stores apart from the head, as [1, V]."""

    weight: Tensor

    def __init__(self, *, vocab_size: int, name: str) -> None:
        super().__init__(name)
        self.weight = parameter(vocab_size, dtype=torch.float32)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        part = TensorPart.all(self.weight.shape)
        yield names[0], Slot(self.weight, "zeros", replace(part, stored=(1, *self.weight.shape)))


class EncoderDecoder(CausalLM):
    """Decoder with its output head; the encoder is a tower of `quire.multimodal`."""

    takes_media = True
    also_tables = ("model.embed_tokens", "lm_head", "model.encoder.embed_tokens", "encoder.embed_tokens")

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch = config.arch
        names = arch.names
        self.merged, self.renamed, self.unused = names.merged, names.renamed, names.unused
        self.model = CrossingDecoder(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")
        self.multiplier = arch.logits_multiplier
        self.final_logits_bias = (
            LogitsBias(vocab_size=arch.vocab_size, name=f"{prefix}{LOGITS_BIAS}")
            if arch.logits_bias
            else None
        )
        if self.final_logits_bias is not None and self.lm_head is not None:
            self.lm_head.adds(self.final_logits_bias)

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        hidden: Tensor = self.model(inputs, positions, step)
        return hidden

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        return super().compute_logits(hidden, adapter_rows, num_added)
