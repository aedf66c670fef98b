"""OPT (Zhang et al., 2022, arXiv:2205.01068).

Learned positions (the table's first two rows are unused), LayerNorm before or after each block, a plain MLP; the
embedding may be narrower than the hidden size, with a projection at either end.

Shapes: T tokens of the step, H hidden size, E embedding size, I intermediate size.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.activation import PLAIN
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import PositionEmbedding, VocabEmbedding
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import LayerNorm
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head

_UNUSED_POSITIONS = 2


def _layer_norm(config: EngineConfig, name: str) -> LayerNorm:
    arch = config.arch
    return LayerNorm(size=arch.hidden_size, eps=arch.norm_eps, dtype=activation_dtype(config), name=name)


class OPTAttention(Module):
    """Multi-head attention."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.qkv_proj = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
        )
        self.out_proj = Linear(
            in_features=arch.hidden_size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            cut="input",
        )
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
        )

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.out_proj(self.attn(*self.qkv_proj.heads(x, step), positions, step), step)


class OPTDecoderLayer(Module):
    """Attention and MLP around a residual stream, normed on the way into each block or on the way out of it."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.norm_before = arch.do_layer_norm_before
        self.self_attn = OPTAttention(config=config, prefix=f"{prefix}.self_attn")
        self.self_attn_layer_norm = _layer_norm(config, f"{prefix}.self_attn_layer_norm")
        self.fc1 = Linear(
            in_features=arch.hidden_size,
            out_features=arch.intermediate_size,
            bias=arch.mlp_bias,
            dtype=dtype,
            name=f"{prefix}.fc1",
            cut="output",
        )
        self.fc2 = Linear(
            in_features=arch.intermediate_size,
            out_features=arch.hidden_size,
            bias=arch.mlp_bias,
            dtype=dtype,
            name=f"{prefix}.fc2",
            cut="input",
        )
        self.final_layer_norm = _layer_norm(config, f"{prefix}.final_layer_norm")
        self.activation = PLAIN[arch.hidden_act]

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), positions, step)
            return x + self._mlp(self.final_layer_norm(x), step)
        x = self.self_attn_layer_norm(x + self.self_attn(x, positions, step))
        return self.final_layer_norm(x + self._mlp(x, step))

    def _mlp(self, x: Tensor, step: StepContext) -> Tensor:
        return self.fc2(self.activation(self.fc1(x, step)), step)


class NoProjection(Module):
    """In place of one, where the embedding is as wide as the hidden states."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        return x


class OPTDecoder(Module):
    """Embeddings, decoder layers and, where the family member has them, final norm and projections E <-> H."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        hidden_size, embed_size = arch.hidden_size, arch.word_embed_proj_dim or arch.hidden_size
        projected = embed_size != hidden_size
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=embed_size,
            dtype=dtype,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = PositionEmbedding(
            config=config, offset=_UNUSED_POSITIONS, name=f"{prefix}.embed_positions"
        )
        self.project_in, self.project_out = (
            Linear(
                in_features=size_in,
                out_features=size_out,
                bias=False,
                dtype=dtype,
                name=f"{prefix}.{name}",
            )
            if projected
            else NoProjection()
            for name, size_in, size_out in (
                ("project_in", embed_size, hidden_size),
                ("project_out", hidden_size, embed_size),
            )
        )
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config=config, prefix=f"{prefix}.layers.{layer}")
            for layer in range(arch.num_layers)
        )
        norm = _layer_norm(config, f"{prefix}.final_layer_norm")
        self.final_layer_norm = norm if arch.final_norm else nn.Identity()

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x = self.project_in(self.embed_tokens(inputs), step) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, positions, step)
        return self.project_out(self.final_layer_norm(x), step)


class OPTModel(Module):
    """The decoder, under the name the checkpoint gives it."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config=config, prefix=f"{prefix}.decoder")


class OPTForCausalLM(CausalLM):
    """OPT with its output head."""

    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.model = OPTModel(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.decoder.embed_tokens, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.model.decoder(inputs, positions, step)
