# SPDX-License-Identifier: Apache-2.0
"""OPT (Zhang et al., 2022, arXiv:2205.01068).

Learned positions (the table's first two rows are unused), LayerNorm before or after each block, a plain MLP; the
embedding may be narrower than the hidden size, with a projection at either end.

Shapes: T tokens of the step, H hidden size, E embedding size.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import QKV_APART
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import PositionEmbedding, VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import block_norm
from quire.layers.self_attention import SelfAttention
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head
from quire.models.stack import Stack

_UNUSED_POSITIONS = 2


class OPTDecoderLayer(Module):
    """Attention and MLP on a residual stream, with norms before or after each."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        self.norm_before = config.arch.do_layer_norm_before
        self.self_attn = SelfAttention(config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=None)
        self.self_attn_layer_norm = block_norm(config, f"{prefix}.self_attn_layer_norm")
        self.mlp = PlainMLP(config=config, prefix=f"{prefix}.mlp")
        self.final_layer_norm = block_norm(config, f"{prefix}.final_layer_norm")

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), positions, step)
            return x + self.mlp(self.final_layer_norm(x), step)
        x = self.self_attn_layer_norm(x + self.self_attn(x, positions, step))
        return self.final_layer_norm(x + self.mlp(x, step))


class NoProjection(Module):
    """Identity for models whose embedding is as wide as the hidden states."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        return x


class OPTDecoder(Stack):
    """Embeddings, decoder layers and, in models that have them, final norm and projections E <-> H."""

    entering = ("embed_tokens", "embed_positions", "project_in")
    leaving = ("final_layer_norm", "project_out")

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch, dtype = config.arch, model_dtype(config)
        hidden_size, embed_size = arch.hidden_size, arch.word_embed_proj_dim or arch.hidden_size
        projected = embed_size != hidden_size
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=embed_size,
            dtype=dtype,
            is_head=arch.tie_word_embeddings and config.pooling is None,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = PositionEmbedding(
            config=config, offset=_UNUSED_POSITIONS, name=f"{prefix}.embed_positions"
        )
        self.project_in, self.project_out = (
            Linear(
                in_features=size_in, out_features=size_out, bias=False, dtype=dtype, name=f"{prefix}.{name}"
            )
            if projected
            else NoProjection()
            for name, size_in, size_out in (
                ("project_in", embed_size, hidden_size),
                ("project_out", hidden_size, embed_size),
            )
        )
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config=config, prefix=f"{prefix}.layers.{layer}", layer=layer)
            for layer in range(arch.num_layers)
        )
        norm = block_norm(config, f"{prefix}.final_layer_norm")
        self.final_layer_norm = norm if arch.final_norm else nn.Identity()

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x = self._embedded(inputs, positions, step) if self.enters else self.received(step)
        for _, layer in self.own_layers():
            x = layer(x, positions, step)
        return self.project_out(self.final_layer_norm(x), step) if self.ends else x

    def _embedded(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        embedded: Tensor = self.project_in(self.embed_tokens(inputs, step.adapter_rows), step)
        return embedded + self.embed_positions(positions)


class OPTModel(Module):
    """Decoder under the checkpoint's name."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config=config, prefix=f"{prefix}.decoder")


class OPTForCausalLM(CausalLM):
    """OPT with its output head."""

    merged: Mapping[str, tuple[str, ...]] = QKV_APART
    renamed: Mapping[str, str] = {"o_proj": "out_proj", "mlp": "", "up_proj": "fc1", "down_proj": "fc2"}

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.model = OPTModel(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.decoder.embed_tokens, f"{prefix}lm_head")

    def stack(self) -> Stack | None:
        return self.model.decoder

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.model.decoder(inputs, positions, step)
