# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's text model (Google, 2026): a Gemma 3 with per-layer token embeddings, or with experts beside the MLPs.

Layers without window have larger heads, whose keys may serve as values; the last layers may reuse earlier keys and
values. Shapes: T tokens of the step, H hidden size, L layers, P size of a token's row for each layer, k experts of a
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype
from quire.layers.experts import ExpertRouter, Experts
from quire.layers.head_norms import HeadRMSNorm
from quire.layers.mlp import GatedMLP
from quire.layers.norm import block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import ShardSpan
from quire.layers.step import StepContext
from quire.layers.vectors import LayerVector, VectorLayer
from quire.models.decoder import DecoderForCausalLM
from quire.models.gemma_parts import PerLayerEmbedding, SharedKVBlock, SharedKVStack, TokenRowGate


class Multipliers(VectorLayer):
    """Learned factors, whole on each rank, that the checkpoint stores under this layer's name."""

    vectors = (LayerVector("weight", "", "ones"),)
    weight: Tensor

    def __init__(self, size: int, *, dtype: torch.dtype, name: str) -> None:
        super().__init__(ShardSpan(1, size, replicated=True), dtype=dtype, name=name)


class ScaledRouter(Module):
    """Router that reads the normed and scaled stream, and scales each expert's weight."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, experts = config.arch, config.arch.experts
        assert experts is not None, "a layer of this kind is described"
        size, dtype = arch.hidden_size, activation_dtype(config)
        self.scale = HeadRMSNorm(size=size, eps=arch.norm_eps, dtype=dtype, name=f"{prefix}.scale")
        self.shrink = size**-0.5
        self.proj = ExpertRouter(config=config, experts=experts, name=f"{prefix}.proj")
        self.per_expert_scale = Multipliers(
            experts.count, dtype=torch.float32, name=f"{prefix}.per_expert_scale"
        )

    def choose(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each token, int32 [T, k], and their weights, float32 [T, k]."""
        chosen, weights = self.proj.choose(self.scale(x) * self.shrink, step)
        return chosen, weights * self.per_expert_scale.weight[chosen.long()]


class ExpertsBesideMLP(Module):
    """Experts on the residual stream, between two norms of their own; a third one norms the MLP's output."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        experts = config.arch.experts
        assert experts is not None, "a layer of this kind is described"
        self.router = ScaledRouter(config=config, prefix=f"{prefix}.router")
        self.experts = Experts(config=config, experts=experts, prefix=f"{prefix}.experts")
        self.post_feedforward_layernorm_1 = block_norm(config, f"{prefix}.post_feedforward_layernorm_1")
        self.pre_feedforward_layernorm_2 = block_norm(config, f"{prefix}.pre_feedforward_layernorm_2")
        self.post_feedforward_layernorm_2 = block_norm(config, f"{prefix}.post_feedforward_layernorm_2")

    def forward(self, x: Tensor, fed: Tensor, step: StepContext) -> Tensor:
        """Residual stream x [T, H] and the MLP's output [T, H] -> their sum [T, H]."""
        chosen, weights = self.router.choose(x, step)
        routed = self.experts(self.pre_feedforward_layernorm_2(x), chosen, weights, step)
        return self.post_feedforward_layernorm_1(fed) + self.post_feedforward_layernorm_2(routed)


class Gemma4Block(SharedKVBlock):
    """Decoder layer with an MLP, and perhaps experts beside it or a token's row behind it."""

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
        arch = config.arch
        self.mlp = GatedMLP(config=config, prefix=f"{prefix}.mlp")
        self.beside = self.token_row = None
        if arch.experts is not None:
            self.beside = ExpertsBesideMLP(config=config, prefix=f"{prefix}.beside")
        if arch.token_rows is not None:
            self.token_row = TokenRowGate(config=config, prefix=f"{prefix}.token_row")
        self.layer_scalar = Multipliers(1, dtype=activation_dtype(config), name=f"{prefix}.layer_scalar")

    def forward(self, x: Tensor, rows: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """Stream x [T, H] and the tokens' rows of this layer [T, P], if the model has some -> [T, H]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, step))
        fed = self.mlp(self.pre_feedforward_layernorm(x), step)
        if self.beside is not None:
            fed = self.beside(x, fed, step)
        x = x + self.post_feedforward_layernorm(fed)
        if self.token_row is not None and rows is not None:
            x = x + self.token_row(x, rows, step)
        return x * self.layer_scalar.weight


class Gemma4Decoder(SharedKVStack):
    """Embeddings, layers and the last norm.

    A stage passes on the stream and each token's rows for later layers.
    """

    entering = ("embed_tokens", "token_rows")
    takes_media = True

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        self.row_size = 0 if config.arch.token_rows is None else config.arch.token_rows.size
        self.token_rows = None
        if self.row_size:
            self.token_rows = PerLayerEmbedding(config=config, prefix=f"{prefix}.token_rows")
        self.layers = self.made_layers(Gemma4Block, config, prefix)
        self.norm = block_norm(config, f"{prefix}.norm")

    def stream_size(self, layer: int) -> int:
        return self._hidden_size + (len(self.layers) - layer) * self.row_size

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """See `CausalLM.forward`."""
        x, rows = self._embedded(inputs, step) if self.enters else self._apart(self.received(step))
        for number, layer in self.own_layers():
            own = None if rows is None else rows[:, number - self.own.start]
            x = layer(x, own, positions, step)
        if self.ends:
            return self.norm(x)
        return x if rows is None else torch.cat((x, rows[:, len(self.own) :].flatten(1)), dim=1)

    def _embedded(self, inputs: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """Return the stream [T, H] and the tokens' rows [T, L, P], if the model has some."""
        x: Tensor = self.embed_tokens(inputs, step.adapter_rows)
        if step.media is not None:
            x = x.index_copy(0, step.media.rows, step.media.values.to(x.dtype))
        return x, None if self.token_rows is None else self.token_rows(inputs, x, step)

    def _apart(self, received: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the previous stage's output into the stream and rows for this stage's layers and later ones."""
        if not self.row_size:
            return received, None
        x, rows = received[:, : self._hidden_size], received[:, self._hidden_size :]
        return x.contiguous(), torch.unflatten(rows, 1, (-1, self.row_size))


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Gemma 4's decoder with its output head."""

    decoder = Gemma4Decoder
