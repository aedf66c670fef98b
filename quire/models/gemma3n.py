# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n's text model (Google, 2025): a Gemma 3 with several residual streams, of which layers compute one.

Inside the whole model the tokens of images and sounds, such as those around a sound, have tables of their own.
Shapes: T tokens of the step, H hidden size, N streams, L layers, P size of a token's row for each layer.
"""

import math

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import AlternatingArch, TokenTableArch
from quire.layers.altup import AltUp
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM
from quire.models.gemma_parts import PerLayerEmbedding, SharedKVBlock, SharedKVStack, TokenRowGate, linear

_LEAST_POWER = 1e-5


class Laurel(Module):
    """Learned augmented residual layer (Menghani et al., 2024, arXiv:2411.07501): `x + norm(right(left(x)))`.

    Its rank is low, so it is replicated over ranks.
    """

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        hidden, rank = config.arch.hidden_size, _own(config).laurel_rank
        self.linear_left = linear(config, f"{prefix}.linear_left", hidden, rank)
        self.linear_right = linear(config, f"{prefix}.linear_right", rank, hidden)
        self.post_laurel_norm = block_norm(config, f"{prefix}.post_laurel_norm")

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x, step), step))


class Gemma3nBlock(SharedKVBlock):
    """Decoder layer that computes one of the streams and corrects all by it."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        prefix: str,
        layer: int,
        rotary: RotaryEmbedding | None,
        source: Attention | None,
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary, source=source)
        own = _own(config)
        self.altup = AltUp(config=config, prefix=f"{prefix}.altup", streams=own.streams)
        self.laurel = Laurel(config=config, prefix=f"{prefix}.laurel")
        self.mlp = GatedMLP(config=config, prefix=f"{prefix}.mlp", sparsity=own.sparsity[layer])
        self.token_row = TokenRowGate(config=config, prefix=f"{prefix}.token_row")

    def forward(self, streams: Tensor, rows_by_layer: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Streams [N, T, H], and per-layer token rows of this layer [T, P] -> streams [N, T, H]."""
        predicted = self.altup.predict(streams, step)
        x = self.input_layernorm(predicted[0])
        attended = predicted[0] + self.post_attention_layernorm(self.self_attn(x, positions, step))
        x = (attended + self.laurel(x, step)) * math.sqrt(0.5)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), step))
        streams = self.altup.correct(predicted, x, step)
        added = self.token_row(self.altup.correct_output_scale(streams[0]), rows_by_layer, step)
        return torch.cat((streams[:1], streams[1:] + added))


class TokenTable(Module):
    """Embeddings of the tokens of one kind of media: rows of a table, normed, projected and normed again."""

    def __init__(self, *, config: EngineConfig, own: TokenTableArch, prefix: str) -> None:
        super().__init__()
        hidden, dtype = config.arch.hidden_size, activation_dtype(config)
        self.first, self.count = own.first, own.count
        self.embedding = VocabEmbedding(
            vocab_size=own.count,
            size=own.size,
            dtype=model_dtype(config),
            out_dtype=dtype,
            name=f"{prefix}.embedding",
        )
        self.hard_embedding_norm = RMSNorm(
            size=own.size, eps=own.eps, dtype=dtype, name=f"{prefix}.hard_embedding_norm"
        )
        self.embedding_projection = linear(config, f"{prefix}.embedding_projection", own.size, hidden)
        self.embedding_post_projection_norm = RMSNorm(
            size=hidden,
            eps=own.eps,
            dtype=dtype,
            has_weight=False,
            name=f"{prefix}.embedding_post_projection_norm",
        )

    def forward(self, ids: Tensor, x: Tensor, step: StepContext) -> Tensor:
        """Ids [T] and embeddings x [T, H] -> x with the table's tokens in their place."""
        places = ids - self.first
        is_own = (places >= 0) & (places < self.count)
        rows = self.embedding(torch.where(is_own, places, 0), step.adapter_rows)
        projected = self.embedding_projection(self.hard_embedding_norm(rows), step)
        return torch.where(is_own[:, None], self.embedding_post_projection_norm(projected), x)


class Gemma3nDecoder(SharedKVStack):
    """Embeddings, expanded to streams, layers, and the streams' mean, normed.

    A stage passes on each token's streams and its per-layer rows for later layers.
    """

    entering = ("embed_tokens", "token_tables", "token_rows", "altup_projections")
    leaving = ("altup_unembed_projections", "norm")
    takes_media = True

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        own = _own(config)
        self.num_streams = own.streams
        self.token_tables = nn.ModuleDict(
            {
                table.module: TokenTable(
                    config=config, own=table, prefix=f"{prefix}.token_tables.{table.module}"
                )
                for table in config.arch.token_tables
            }
        )
        self.token_rows = PerLayerEmbedding(config=config, prefix=f"{prefix}.token_rows")
        self.token_size = self.token_rows.size
        self.altup_projections = self._projections(config, f"{prefix}.altup_projections", own.streams)
        self.altup_unembed_projections = self._projections(
            config, f"{prefix}.altup_unembed_projections", own.streams
        )
        self.layers = self.made_layers(Gemma3nBlock, config, prefix)
        self.norm = block_norm(config, f"{prefix}.norm")

    @staticmethod
    def _projections(config: EngineConfig, prefix: str, streams: int) -> nn.ModuleList:
        hidden = config.arch.hidden_size
        return nn.ModuleList(
            linear(config, f"{prefix}.{number}", hidden, hidden) for number in range(streams - 1)
        )

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
        x: Tensor = self.embed_tokens(inputs, step.adapter_rows)
        if not inputs.is_floating_point():
            for table in self.token_tables.values():
                x = table(inputs, x, step)
        if step.media is not None:
            x = x.index_copy(0, step.media.rows, step.media.values.to(x.dtype))
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
