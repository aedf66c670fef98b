# SPDX-License-Identifier: Apache-2.0
"""Encoder-only transformer as its `ModelArch` describes it (BERT and its descendants), and its classifier head.

Shapes: T tokens of the step, E embedding size, H hidden size, N classified texts or tokens, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import HeadArch
from quire.config.pooling import HeadLayer
from quire.layers.activation import PLAIN
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.bidirectional_attention import BidirectionalAttention
from quire.layers.embedding import PositionEmbedding, TokenTypeEmbedding, VocabEmbedding
from quire.layers.head import HeadLinear, TableLinear
from quire.layers.norm import block_norm
from quire.layers.relative_bias import RelativeBias
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.block_kinds import BLOCKS
from quire.models.decoder import rotaries_of
from quire.models.stack import Stack


class EncoderStack(Stack):
    """Embeddings of tokens, positions and token types, layers, and optionally a final norm."""

    entering = (*Stack.entering, "embed_token_types")

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch = config.arch
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.embedding_multiplier,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = self.embed_token_types = self.embed_norm = self.relative_bias = None
        if arch.positions is not None:
            assert arch.positions == "learned", "encoders have learned or rotary positions"
            self.embed_positions = PositionEmbedding(
                config=config, offset=arch.position_offset, name=f"{prefix}.embed_positions"
            )
        if arch.token_types:
            self.embed_token_types = TokenTypeEmbedding(
                config=config, count=arch.token_types, name=f"{prefix}.embed_token_types"
            )
        if arch.embedding_norm:
            self.embed_norm = block_norm(config, f"{prefix}.embed_norm")
        if arch.relative_buckets:
            self.relative_bias = RelativeBias(
                config=config, buckets=arch.relative_buckets, name=f"{prefix}.relative_bias"
            )
        rotaries = rotaries_of(config)
        self.layers = nn.ModuleList(
            BLOCKS[arch.block_of(layer)](
                config=config, prefix=f"{prefix}.layers.{layer}", layer=layer, rotary=rotaries[layer]
            )
            for layer in range(arch.num_layers)
        )
        for module in self.modules():
            if isinstance(module, BidirectionalAttention):
                module.relative_bias = self.relative_bias
        self.norm = block_norm(config, f"{prefix}.norm") if arch.final_norm else None

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = self._embedded(inputs, positions, step) if self.enters else self.received(step), None
        for _, layer in self.own_layers():
            x, residual = layer(x, residual, positions, step)
        if self.norm is None:
            return x if residual is None else x + residual
        hidden, _ = self.norm.add(x, residual)
        return hidden

    def _embedded(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x: Tensor = self.embed_tokens(inputs, step.adapter_rows)
        if self.embed_token_types is not None:
            x = x + self.embed_token_types(step.token_types)
        placed = None if self.embed_positions is None else self.embed_positions(positions)
        if self.embed_norm is not None:
            return self.embed_norm.add(x, placed)[0]
        return x if placed is None else x + placed


class ClassifierHead(Module):
    """Classifier, never quantized: a linear layer, in most models after a dense layer, its activation and perhaps a
    norm.
    """

    def __init__(self, *, config: EngineConfig, head: HeadArch, prefix: str) -> None:
        super().__init__()
        size = config.arch.hidden_size
        self.dense = self.dense_norm = None
        if head.dense is not None:
            self.dense = HeadLinear(HeadLayer("dense", size, size, head.dense_bias), f"{prefix}.")
            self.activation = PLAIN[head.dense]
        if head.norm:
            self.dense_norm = block_norm(config, f"{prefix}.dense_norm")
        last = HeadLayer("out_proj", size, head.classes)
        self.out_proj = HeadLinear(last, f"{prefix}.")
        if head.table:
            self.out_proj = TableLinear(last, table=head.table, bias=head.table_bias, prefix=f"{prefix}.")

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x float32 [N, H], pooled texts or token states -> [N, C]; step: see `PoolingHead`."""
        if self.dense is not None:
            x = self.activation(self.dense(x, step))
        if self.dense_norm is not None:
            x = self.dense_norm(x)
        scores: Tensor = self.out_proj(x, step)
        return scores


class EncoderModel(CausalLM):
    """Encoder with the classifier head of its checkpoint; it has no token logits.

    `head` computes class scores of a text pooled by `arch.head.pooling`, or of each token; None: there is none.
    """

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.lm_head = None
        names, head = config.arch.names, config.arch.head
        self.merged, self.renamed, self.unused = names.merged, names.renamed, names.unused
        self.base_prefix = names.renamed.get("model", "model") + "."
        self.model = EncoderStack(config=config, prefix=f"{prefix}model")
        self.head = None if head is None else ClassifierHead(config=config, head=head, prefix=f"{prefix}head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Compute hidden states [T, H] of texts that are complete in the step."""
        hidden: Tensor = self.model(inputs, positions, step)
        return hidden

    def stack(self) -> Stack | None:
        return self.model

    def modules_after_layers(self) -> list[nn.Module]:
        return [] if self.head is None else [self.head]

    def drop_head(self) -> None:
        self.head = None

    def pool_head(self) -> Module | None:
        """See `CausalLM.pool_head`."""
        return self.head
