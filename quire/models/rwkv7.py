"""RWKV-7: layers that keep a state, and hand the first one's values down to all others.

Shapes: T tokens of the step, H hidden size.
"""

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.norm import block_norm
from quire.layers.rwkv7 import ChannelMix, TimeMix, state_cache
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM


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
        """x [T, H] and the first layer's values -> the same of the next layer."""
        mixed, first = self.attn(self.input_layernorm(x), first, self.cache, step)
        normed, x = self.post_attention_layernorm.add(mixed, x)
        return x + self.ffn(normed, self.cache, step), first


class RWKV7Decoder(Module):
    """Embeddings, which are normed, layers and final norm."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
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
        self.norm = block_norm(config, f"{prefix}.norm")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """As `CausalLM.forward`."""
        x, first = self.embed_tokens(inputs, step.adapter_rows), None
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        for layer in self.layers:
            x, first = layer(x, first, step)
        return self.norm(x)


class RWKV7ForCausalLM(DecoderForCausalLM):
    """RWKV-7's decoder with its output head."""

    decoder = RWKV7Decoder
