# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n's text model (Google, 2025): a Gemma 3 with several residual streams, of which layers compute one.

Shapes: T tokens of the step, H hidden size, N streams, L layers, P size of a token's row for each layer.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import AlternatingArch
from quire.kernels.linear import Function
from quire.layers.activation import FUNCTIONS
from quire.layers.altup import AltUp
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention, SharedKVAttention
from quire.layers.shard import Partition
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM, rotaries_of
from quire.models.stack import Stack

_LEAST_POWER = 1e-5


class Laurel(Module):
    """Learned augmented residual layer (Menghani et al., 2024, arXiv:2411.07501): `x + norm(right(left(x)))`.

    Its rank is low, so it is replicated over ranks.
    """

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        hidden, rank = config.arch.hidden_size, _own(config).laurel_rank
        self.linear_left = _linear(config, f"{prefix}.linear_left", hidden, rank)
        self.linear_right = _linear(config, f"{prefix}.linear_right", rank, hidden)
        self.post_laurel_norm = block_norm(config, f"{prefix}.post_laurel_norm")

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x, step), step))


class Gemma3nBlock(Module):
    """Decoder layer; `source` is the attention whose cache it reads if it has no keys and values."""

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
        arch, own, sparsity = config.arch, _own(config), _own(config).sparsity[layer]
        self.altup = AltUp(config=config, prefix=f"{prefix}.altup", streams=own.streams)
        self.laurel = Laurel(config=config, prefix=f"{prefix}.laurel")
        at = f"{prefix}.self_attn"
        self.self_attn = (
            SelfAttention(config=config, prefix=at, layer=layer, rotary=rotary)
            if source is None
            else SharedKVAttention(config=config, prefix=at, source=source, rotary=rotary)
        )
        self.mlp = GatedMLP(config=config, prefix=f"{prefix}.mlp", sparsity=sparsity)
        self.input_layernorm = block_norm(config, f"{prefix}.input_layernorm")
        self.post_attention_layernorm = block_norm(config, f"{prefix}.post_attention_layernorm")
        self.pre_feedforward_layernorm = block_norm(config, f"{prefix}.pre_feedforward_layernorm")
        self.post_feedforward_layernorm = block_norm(config, f"{prefix}.post_feedforward_layernorm")
        assert arch.token_rows is not None, "a model of this kind is described"
        hidden, size = arch.hidden_size, arch.token_rows.size
        self.per_layer_input_gate = _linear(
            config, f"{prefix}.per_layer_input_gate", hidden, size, "output", FUNCTIONS[arch.hidden_act]
        )
        self.per_layer_projection = _linear(config, f"{prefix}.per_layer_projection", size, hidden, "input")
        self.post_per_layer_input_norm = block_norm(config, f"{prefix}.post_per_layer_input_norm")

    def keys_and_values(self) -> Attention:
        """Return the attention that later layers read."""
        assert isinstance(self.self_attn, SelfAttention), "a layer that is read has keys and values"
        assert isinstance(self.self_attn.attn, Attention), "a decoder has causal attention"
        return self.self_attn.attn

    def forward(self, streams: Tensor, rows_by_layer: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Streams [N, T, H], and per-layer token rows of this layer [T, P] -> streams [N, T, H]."""
        predicted = self.altup.predict(streams, step)
        x = self.input_layernorm(predicted[0])
        attended = predicted[0] + self.post_attention_layernorm(self.self_attn(x, positions, step))
        x = (attended + self.laurel(x, step)) * math.sqrt(0.5)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), step))
        streams = self.altup.correct(predicted, x, step)
        gate = self.per_layer_input_gate(self.altup.correct_output_scale(streams[0]), step)
        rows_by_layer = rows_by_layer[:, self.per_layer_input_gate.rows[0]]
        rows_by_layer = self.post_per_layer_input_norm(self.per_layer_projection(gate * rows_by_layer, step))
        return torch.cat((streams[:1], streams[1:] + rows_by_layer))


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
        self.per_layer_model_projection = _linear(
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
        if step.media is not None:
            known = known.index_fill(0, step.media.rows, self.media_token)
        own = self.embed_tokens_per_layer(known, step.adapter_rows)
        return (rows + own.view(rows.shape)) * math.sqrt(0.5)


class Gemma3nDecoder(Stack):
    """Embeddings, expanded to streams, layers, and the streams' mean, normed.

    A stage passes on each token's streams and its per-layer rows for later layers.
    """

    entering = ("embed_tokens", "token_rows", "altup_projections")
    leaving = ("altup_unembed_projections", "norm")

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch, own = config.arch, _own(config)
        self.num_streams, self.shared_kv = own.streams, arch.shared_kv
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.embedding_multiplier,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.token_rows = PerLayerEmbedding(config=config, prefix=f"{prefix}.token_rows")
        self.token_size = self.token_rows.size
        self.altup_projections = self._projections(config, f"{prefix}.altup_projections", own.streams)
        self.altup_unembed_projections = self._projections(
            config, f"{prefix}.altup_unembed_projections", own.streams
        )
        blocks: list[Gemma3nBlock] = []
        for layer, rotary in enumerate(rotaries_of(config)):
            source = blocks[arch.shared_kv[layer]].keys_and_values() if layer in arch.shared_kv else None
            at = f"{prefix}.layers.{layer}"
            blocks.append(Gemma3nBlock(config=config, prefix=at, layer=layer, rotary=rotary, source=source))
        self.layers = nn.ModuleList(blocks)
        self.norm = block_norm(config, f"{prefix}.norm")

    @staticmethod
    def _projections(config: EngineConfig, prefix: str, streams: int) -> nn.ModuleList:
        hidden = config.arch.hidden_size
        return nn.ModuleList(
            _linear(config, f"{prefix}.{number}", hidden, hidden) for number in range(streams - 1)
        )

    def joined(self) -> Collection[int]:
        """Return all layers after a cache's owner up to its last reader: they read the cache of that stage."""
        return {number for reader, read in self.shared_kv.items() for number in range(read + 1, reader + 1)}

    def stream_size(self, layer: int) -> int:
        return self.num_streams * self._hidden_size + (len(self.layers) - layer) * self.token_size

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """See `CausalLM.forward`."""
        streams, rows_by_layer = (
            self._embedded(inputs, step) if self.enters else self._apart(self.received(step))
        )
        for number, layer in self.own_layers():
            streams = layer(streams, rows_by_layer[:, number - self.own.start], positions, step)
        if not self.ends:
            return torch.cat((*streams, rows_by_layer[:, len(self.own) :].flatten(1)), dim=1)
        total = streams[0]
        for stream, project in zip(streams[1:], self.altup_unembed_projections, strict=True):
            total = total + _as_strong(project(stream, step), streams[0])
        return self.norm(total / len(streams))

    def _embedded(self, inputs: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Return streams [N, T, H] and per-layer token rows [T, L, P]."""
        x = self.embed_tokens(inputs, step.adapter_rows)
        rows_by_layer = self.token_rows(inputs, x, step)
        made = [_as_strong(project(x, step), x) for project in self.altup_projections]
        return torch.stack((x, *made)), rows_by_layer

    def _apart(self, received: Tensor) -> tuple[Tensor, Tensor]:
        """Split the previous stage's output into streams and rows, for this stage's layers and later ones."""
        size = self.num_streams * self._hidden_size
        streams = torch.unflatten(received[:, :size], 1, (self.num_streams, -1)).transpose(0, 1).contiguous()
        return streams, torch.unflatten(received[:, size:], 1, (-1, self.token_size))


class Gemma3nForCausalLM(DecoderForCausalLM):
    """Gemma 3n's decoder with its output head."""

    decoder = Gemma3nDecoder


def _as_strong(x: Tensor, like: Tensor) -> Tensor:
    """Scale each row of x [T, H] to the root mean square of the same row of `like`."""
    return x * (_power(like).sqrt() / _power(x).clamp(min=_LEAST_POWER).sqrt())


def _power(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _own(config: EngineConfig) -> AlternatingArch:
    assert config.arch.alternating is not None, "a model of this kind is described"
    return config.arch.alternating


def _linear(
    config: EngineConfig,
    name: str,
    inputs: int,
    outputs: int,
    partition: Partition = "whole",
    activation: Function | None = None,
) -> Linear:
    return Linear(
        in_features=inputs,
        out_features=outputs,
        bias=False,
        dtype=model_dtype(config),
        name=name,
        partition=partition,
        activation=activation,
    )
