"""GPT-2 (Radford et al., 2019).

Learned positions, LayerNorm before each block, a plain MLP; q, k and v come merged and all weights transposed
(transformers' Conv1D), so nothing is renamed here.

Shapes: T tokens of the step, H hidden size, I intermediate size.
"""

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.activation import PLAIN
from quire.layers.attention import Attention
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import PositionEmbedding, VocabEmbedding
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import LayerNorm
from quire.layers.shard import Cut
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head


def _conv1d(size_in: int, size_out: int, dtype: torch.dtype, name: str, cut: Cut) -> Linear:
    return Linear(
        in_features=size_in,
        out_features=size_out,
        bias=True,
        dtype=dtype,
        name=name,
        cut=cut,
        transposed=True,
    )


def _layer_norm(config: EngineConfig, name: str) -> LayerNorm:
    arch = config.arch
    return LayerNorm(size=arch.hidden_size, eps=arch.norm_eps, dtype=activation_dtype(config), name=name)


class GPT2Attention(Module):
    """Multi-head attention."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.c_attn = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=True,
            dtype=dtype,
            name=f"{prefix}.c_attn",
            transposed=True,
        )
        self.c_proj = _conv1d(arch.hidden_size, arch.hidden_size, dtype, f"{prefix}.c_proj", "input")
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.head_dim**-0.5,
        )

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.c_proj(self.attn(*self.c_attn.heads(x, step), positions, step), step)


class GPT2MLP(Module):
    """`c_proj(act(c_fc(x)))`."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.c_fc = _conv1d(arch.hidden_size, arch.intermediate_size, dtype, f"{prefix}.c_fc", "output")
        self.c_proj = _conv1d(arch.intermediate_size, arch.hidden_size, dtype, f"{prefix}.c_proj", "input")
        self.activation = PLAIN[arch.hidden_act]

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x, step)), step)


class GPT2Block(Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        self.ln_1 = _layer_norm(config, f"{prefix}.ln_1")
        self.attn = GPT2Attention(config=config, prefix=f"{prefix}.attn")
        self.ln_2 = _layer_norm(config, f"{prefix}.ln_2")
        self.mlp = GPT2MLP(config=config, prefix=f"{prefix}.mlp")

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x = x + self.attn(self.ln_1(x), positions, step)
        return x + self.mlp(self.ln_2(x), step)


class GPT2Model(Module):
    """Embeddings, blocks and final norm."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        self.wte = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=dtype,
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.wte",
        )
        self.wpe = PositionEmbedding(config=config, name=f"{prefix}.wpe")
        self.h = nn.ModuleList(
            GPT2Block(config=config, prefix=f"{prefix}.h.{layer}") for layer in range(arch.num_layers)
        )
        self.ln_f = _layer_norm(config, f"{prefix}.ln_f")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x = self.wte(inputs) + self.wpe(positions)
        for block in self.h:
            x = block(x, positions, step)
        return self.ln_f(x)


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its output head; early checkpoints also hold the causal mask as a tensor."""

    unused = (r"\.attn\.(masked_)?bias$",)
    base_prefix = "transformer."

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.transformer = GPT2Model(config=config, prefix=f"{prefix}transformer")
        self.lm_head = output_head(config, self.transformer.wte, f"{prefix}lm_head")

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return self.transformer(inputs, positions, step)
