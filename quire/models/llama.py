"""Llama and the families that differ from it by a data row: Mistral, Qwen 2, Qwen 3 and Phi-3.

Llama: Touvron et al., 2023, arXiv:2302.13971. What differs is in `ModelArch` (biases, norms of q and k, windows, rope)
and in the table of merged weights.

Shapes: T tokens of the step, H hidden size, I intermediate size, Hq/Hkv query and key-value heads, D head size.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import GateUpLinear, Linear, QKVLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head


def rms_norm(config: EngineConfig, size: int, name: str) -> RMSNorm:
    """A norm as the checkpoint has it."""
    arch = config.arch
    return RMSNorm(
        size=size, eps=arch.norm_eps, dtype=activation_dtype(config), offset=arch.norm_offset, name=name
    )


class LlamaAttention(Module):
    """Grouped-query attention with rotary positions; q and k may be normed per head."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding) -> None:
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
        self.o_proj = Linear(
            in_features=arch.num_heads * arch.head_dim,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            cut="input",
        )
        qk_norm = None
        if arch.qk_norm:
            self.q_norm, self.k_norm = qk_norm = (
                rms_norm(config, arch.head_dim, f"{prefix}.q_norm"),
                rms_norm(config, arch.head_dim, f"{prefix}.k_norm"),
            )
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=(arch.query_pre_attn_scalar or arch.head_dim) ** -0.5,
            sliding_window=arch.sliding_window if arch.layer_types[layer] == "sliding_attention" else None,
            soft_cap=arch.attn_logit_softcap,
            rotary=rotary,
            qk_norm=qk_norm,
        )

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        q, k, v = self.qkv_proj.heads(x, step)
        return self.o_proj(self.attn(q, k, v, positions, step), step)


class LlamaMLP(Module):
    """`down(act(gate(x)) * up(x))` (SwiGLU: Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.gate_up_proj = GateUpLinear(
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            bias=arch.mlp_bias,
            dtype=dtype,
            activation=arch.hidden_act,
            name=f"{prefix}.gate_up_proj",
        )
        self.down_proj = Linear(
            in_features=arch.intermediate_size,
            out_features=arch.hidden_size,
            bias=arch.mlp_bias,
            dtype=dtype,
            name=f"{prefix}.down_proj",
            cut="input",
        )
        self.down_proj.reads(self.gate_up_proj)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        return self.down_proj(self.gate_up_proj(x, step), step)


class LlamaDecoderLayer(Module):
    """Attention and MLP, each on a normed copy of the residual stream.

    x is what the layer before still has to add to the residual; the norm that follows does it in one pass.
    """

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size = config.arch.hidden_size
        self.input_layernorm = rms_norm(config, size, f"{prefix}.input_layernorm")
        self.self_attn = LlamaAttention(
            config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=rotary
        )
        self.post_attention_layernorm = rms_norm(config, size, f"{prefix}.post_attention_layernorm")
        self.mlp = LlamaMLP(config=config, prefix=f"{prefix}.mlp")
        self.self_attn.qkv_proj.reads(self.input_layernorm)
        self.mlp.gate_up_proj.reads(self.post_attention_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, step)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, step), residual


class LlamaModel(Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        assert arch.rope is not None, "the config reader of a rotary family sets rope"
        rotary = RotaryEmbedding(config=config, rope=arch.rope)
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=dtype,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config=config, prefix=f"{prefix}.layers.{layer}", layer=layer, rotary=rotary)
            for layer in range(arch.num_layers)
        )
        self.norm = rms_norm(config, arch.hidden_size, f"{prefix}.norm")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = self.embed_tokens(inputs), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, step)
        hidden, _ = self.norm.add(x, residual)
        return hidden


class LlamaForCausalLM(CausalLM):
    """Llama, Mistral, Qwen 2 and Qwen 3."""

    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    unused = (r"\.rotary_emb\.inv_freq$",)

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.model = LlamaModel(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.model(inputs, positions, step)


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 (Abdin et al., 2024, arXiv:2404.14219): its checkpoints hold the merged weights already."""

    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {}
