"""Gemma 2 (arXiv:2408.00118) and Gemma 3 text (arXiv:2503.19786).

Against Llama: scaled embeddings, and a norm before and after each block. Data rows of `ModelArch`: weights of norms
stored minus one, tanh GELU, a query scale of their own, windows on some layers; Gemma 2 caps scores and logits softly;
Gemma 3 norms q and k and gives windowed layers their own rotary embedding.

Shapes: T tokens of the step, H hidden size, N rows of logits, V vocabulary rows.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head
from quire.models.llama import LlamaAttention, LlamaMLP, rms_norm


class GemmaDecoderLayer(Module):
    """Attention and MLP, each between two norms; x is what is still to be added to the residual."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size = config.arch.hidden_size
        self.input_layernorm = rms_norm(config, size, f"{prefix}.input_layernorm")
        self.self_attn = LlamaAttention(
            config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=rotary
        )
        self.post_attention_layernorm = rms_norm(config, size, f"{prefix}.post_attention_layernorm")
        self.pre_feedforward_layernorm = rms_norm(config, size, f"{prefix}.pre_feedforward_layernorm")
        self.mlp = LlamaMLP(config=config, prefix=f"{prefix}.mlp")
        self.post_feedforward_layernorm = rms_norm(config, size, f"{prefix}.post_feedforward_layernorm")
        self.self_attn.qkv_proj.reads(self.input_layernorm)
        self.mlp.gate_up_proj.reads(self.pre_feedforward_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, positions, step))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x, step)), residual


class GemmaModel(Module):
    """Scaled embedding, decoder layers and final norm."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        assert arch.rope is not None, "the config reader of a rotary family sets rope"
        rotary = RotaryEmbedding(config=config, rope=arch.rope)
        local = rotary if arch.rope_local is None else RotaryEmbedding(config=config, rope=arch.rope_local)
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.hidden_size**0.5,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            GemmaDecoderLayer(
                config=config,
                prefix=f"{prefix}.layers.{layer}",
                layer=layer,
                rotary=local if arch.layer_types[layer] == "sliding_attention" else rotary,
            )
            for layer in range(arch.num_layers)
        )
        self.norm = rms_norm(config, arch.hidden_size, f"{prefix}.norm")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = self.embed_tokens(inputs), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, step)
        hidden, _ = self.norm.add(x, residual)
        return hidden


class GemmaForCausalLM(CausalLM):
    """Gemma 2 and Gemma 3 text."""

    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.model = GemmaModel(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.model(inputs, positions, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        cap = self.config.arch.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
