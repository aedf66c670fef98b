# SPDX-License-Identifier: Apache-2.0
"""Parts that Gemma 3n and Gemma 4 have in common: per-layer token embeddings, and layers that read others' caches.

Shapes: T tokens of the step, H hidden size, L layers, P size of a token's row for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.kernels.linear import Function
from quire.layers.activation import FUNCTIONS
from quire.layers.attention import Attention
from quire.layers.attention_variants import SharedKVAttention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention
from quire.layers.shard import Partition
from quire.layers.step import StepContext
from quire.models.decoder import of_layer, rotaries_of
from quire.models.stack import Stack


def linear(
    config: EngineConfig,
    name: str,
    inputs: int,
    outputs: int,
    partition: Partition = "whole",
    activation: Function | None = None,
) -> Linear:
    """Return a linear layer without bias."""
    return Linear(
        in_features=inputs,
        out_features=outputs,
        bias=False,
        dtype=model_dtype(config),
        name=name,
        partition=partition,
        activation=activation,
    )


class PerLayerEmbedding(Module):
    """Per-layer token embeddings: a row of a separate table, plus a projection of the token's embedding."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.token_rows
        assert own is not None, "a model of this kind is described"
        self.size, self.vocab_size, total = own.size, own.vocab, arch.num_layers * own.size
        self.media_token = own.media_token
        self.embed_tokens_per_layer = VocabEmbedding(
            vocab_size=own.vocab,
            size=total,
            dtype=model_dtype(config),
            scale=own.size**0.5,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens_per_layer",
        )
        self.per_layer_model_projection = linear(
            config, f"{prefix}.per_layer_model_projection", arch.hidden_size, total
        )
        self.per_layer_projection_norm = RMSNorm(
            size=own.size,
            eps=arch.norm_eps,
            dtype=activation_dtype(config),
            name=f"{prefix}.per_layer_projection_norm",
        )
        self.shrink = arch.hidden_size**-0.5

    def forward(self, inputs: Tensor, embedded: Tensor, step: StepContext) -> Tensor:
        """Ids [T], or prompt embeddings [T, H] without ids, and their embeddings [T, H] -> [T, L, P]."""
        projected = self.per_layer_model_projection(embedded, step) * self.shrink
        rows = self.per_layer_projection_norm(projected.view(len(embedded), -1, self.size))
        if inputs.is_floating_point():
            return rows
        known = torch.where(inputs < self.vocab_size, inputs, 0)
        if step.media is not None and self.media_token is not None:
            known = known.index_fill(0, step.media.rows, self.media_token)
        own = self.embed_tokens_per_layer(known, step.adapter_rows)
        return (rows + own.view(rows.shape)) * math.sqrt(0.5)


class TokenRowGate(Module):
    """Addition to the stream by a token's row for a layer, gated by the stream."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, own = config.arch, config.arch.token_rows
        assert own is not None, "a model of this kind is described"
        function = FUNCTIONS[arch.hidden_act]
        self.per_layer_input_gate = linear(
            config, f"{prefix}.per_layer_input_gate", arch.hidden_size, own.size, "output", function
        )
        self.per_layer_projection = linear(
            config, f"{prefix}.per_layer_projection", own.size, arch.hidden_size, "input"
        )
        self.post_per_layer_input_norm = block_norm(config, f"{prefix}.post_per_layer_input_norm")

    def forward(self, x: Tensor, rows: Tensor, step: StepContext) -> Tensor:
        """Stream x [T, H] and the tokens' rows of this layer [T, P] -> [T, H], to be added."""
        gated = self.per_layer_input_gate(x, step) * rows[:, self.per_layer_input_gate.rows[0]]
        out: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated, step))
        return out


class SharedKVBlock(Module):
    """Base of decoder layers: attention and the four norms of a Gemma.

    `source` is the attention whose cache the layer reads if it has no keys and values.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        prefix: str,
        layer: int,
        rotary: RotaryEmbedding | None,
        source: Attention | None,
    ) -> None:
        super().__init__()
        at = f"{prefix}.self_attn"
        self.self_attn = (
            SelfAttention(config=config, prefix=at, layer=layer, rotary=rotary)
            if source is None
            else SharedKVAttention(config=config, prefix=at, source=source, rotary=rotary)
        )
        self.input_layernorm = block_norm(config, f"{prefix}.input_layernorm")
        self.post_attention_layernorm = block_norm(config, f"{prefix}.post_attention_layernorm")
        self.pre_feedforward_layernorm = block_norm(config, f"{prefix}.pre_feedforward_layernorm")
        self.post_feedforward_layernorm = block_norm(config, f"{prefix}.post_feedforward_layernorm")

    def keys_and_values(self) -> Attention:
        """Return the attention that later layers read."""
        assert isinstance(self.self_attn, SelfAttention), "a layer that is read has keys and values"
        assert isinstance(self.self_attn.attn, Attention), "a decoder has causal attention"
        return self.self_attn.attn


class SharedKVStack(Stack):
    """Base of decoders: scaled embeddings, and layers of which later ones may read the cache of an earlier one."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch = config.arch
        self.shared_kv = arch.shared_kv
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.embedding_multiplier,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )

    def made_layers(self, make: type[SharedKVBlock], config: EngineConfig, prefix: str) -> nn.ModuleList:
        """Return all layers of a class."""
        blocks: list[SharedKVBlock] = []
        for layer, rotary in enumerate(rotaries_of(config)):
            source = blocks[self.shared_kv[layer]].keys_and_values() if layer in self.shared_kv else None
            own, at = of_layer(config, layer), f"{prefix}.layers.{layer}"
            blocks.append(make(config=own, prefix=at, layer=layer, rotary=rotary, source=source))
        return nn.ModuleList(blocks)

    def joined(self) -> Collection[int]:
        """Return all layers after a cache's owner up to its last reader: they read the cache of that stage."""
        return {number for reader, read in self.shared_kv.items() for number in range(read + 1, reader + 1)}
