# SPDX-License-Identifier: Apache-2.0
"""RWKV-7: recurrent layers, all of which get the first layer's values.

Shapes: T tokens of the step, H hidden size.
"""

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rwkv7 import ChannelMix, TimeMix, heads_of, state_cache
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import length
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM
from quire.models.stack import Stack


class RWKV7Layer(Module):
    """Time mixing and then channel mixing, each on a normed copy of the residual stream."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        self.input_layernorm = block_norm(config, f"{prefix}.input_layernorm")
        self.attn = TimeMix(config=config, prefix=f"{prefix}.attn", layer=layer)
        self.post_attention_layernorm = block_norm(config, f"{prefix}.post_attention_layernorm")
        self.ffn = ChannelMix(config=config, prefix=f"{prefix}.ffn")
        self.cache = state_cache(config, f"{prefix}.cache")

    def forward(self, x: Tensor, first: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        """x [T, H] and the first layer's values -> the next layer's inputs."""
        mixed, first = self.attn(self.input_layernorm(x), first, self.cache, step)
        normed, x = self.post_attention_layernorm.add(mixed, x)
        return x + self.ffn(normed, self.cache, step), first


class RWKV7Decoder(Stack):
    """Embeddings, which are normed, layers and final norm; a stage also passes on the first layer's values."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch = config.arch
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            is_head=arch.tie_word_embeddings and config.pooling is None,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_norm = block_norm(config, f"{prefix}.embed_norm") if arch.embedding_norm else None
        self.layers = nn.ModuleList(
            RWKV7Layer(config=config, prefix=f"{prefix}.layers.{layer}", layer=layer)
            for layer in range(arch.num_layers)
        )
        self.norm: RMSNorm | LayerNorm | None = block_norm(config, f"{prefix}.norm")

        self._heads = heads_of(config)
        self.apply_shard(WHOLE)

    def apply_shard(self, shard: Shard) -> None:
        self._num_values = length(self._heads.piece(shard, "heads"))

    def stream_size(self, layer: int) -> int:
        return self._hidden_size + self._num_values

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Return hidden states, or in stages before the last the input of the next stage."""
        x, first = self._entering(inputs, step)
        for _, layer in self.own_layers():
            x, first = layer(x, first, step)
        if self.norm is None:
            assert first is not None, "a stage has a layer"
            return torch.cat((x, first), dim=-1)
        return self.norm(x)

    def _entering(self, inputs: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        if not self.enters:
            x, first = self.received(step).split((self._hidden_size, self._num_values), dim=-1)
            return x.contiguous(), first.contiguous()
        embedded: Tensor = self.embed_tokens(inputs, step.adapter_rows)
        return embedded if self.embed_norm is None else self.embed_norm(embedded), None


class RWKV7ForCausalLM(DecoderForCausalLM):
    """RWKV-7's decoder with its output head."""

    decoder = RWKV7Decoder
