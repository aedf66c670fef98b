"""Differential attention (T. Ye et al., 2024, arXiv:2410.05258): of two softmaxes, one less a share of the other.

Query heads come in two halves, and so do values: each pair of heads weighs both halves of the values side by side, and
what the second head gives, times a learned number, is taken from what the first one does.

Shapes: T tokens of the step, H hidden size, Hq/Hkv query and key-value heads, D head size.
"""

import math

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.attention import Attention
from quire.layers.base import Module, RowSource, model_dtype, parameter
from quire.layers.linear import Linear, QKVLinear
from quire.layers.qk_norm import head_norm
from quire.layers.quantization import QuantMethod
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import WHOLE, Shard, Span
from quire.layers.step import StepContext
from quire.layers.vectors import Vector, VectorLayer


class Lambda(VectorLayer):
    """What the second head counts: `exp(q1 . k1) - exp(q2 . k2) + start`, of four learned vectors [D].

    `value`, float32 [], is made of them once.
    """

    vectors = tuple(Vector(name, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2"))
    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor

    def __init__(self, *, head_dim: int, layer: int, name: str) -> None:
        super().__init__(Span(1, head_dim, replicated=True), beside=True, name=name)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)

    def create_weights(self, method: QuantMethod | None, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self.value = parameter(dtype=torch.float32)

    def finish_loading(self) -> None:
        first, second = (self.q1 * self.k1).sum().exp(), (self.q2 * self.k2).sum().exp()
        self.value.copy_(first - second + self.start)


class DifferentialAttention(Module):
    """The block of a layer; the deeper it is, the more the second heads count from the start."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype = config.arch, model_dtype(config)
        heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.qkv_proj = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
            paired=True,
        )
        self.o_proj = Linear(
            in_features=heads * size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            cut="input",
        )
        self.share = Lambda(head_dim=size, layer=layer, name=f"{prefix}.share")
        self.norm = head_norm(config, f"{prefix}.norm", num_heads=2)
        # Every head attends twice, once to each half of the values, so that all have one size. The parts are the halves
        # of the heads, twice; a rank has as many pairs of each.
        self.attn = Attention(
            config=config,
            name=f"{prefix}.attn",
            num_heads=2 * heads,
            num_kv_heads=2 * kv_heads,
            head_dim=size,
            scale=size**-0.5,
            rotary=rotary,
            parts=4,
        )

    def reads(self, source: RowSource) -> None:
        """As in `SelfAttention`."""
        self.qkv_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj.heads(x, step)
        first, second = v.chunk(2, dim=1)
        values = torch.cat((first, first, second, second), dim=1)
        out = self.attn(torch.cat((q, q), dim=1), torch.cat((k, k), dim=1), values, positions, step)
        # By half of the values, half of the heads, and number in that half.
        ones, others = out.view(len(x), 2, 2, -1, self.attn.head_dim).unbind(2)
        differences = (ones - self.share.value * others).transpose(1, 2).flatten(2)
        return self.o_proj(((1.0 - self.share.start) * self.norm(differences)).flatten(1), step)
