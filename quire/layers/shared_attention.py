"""The attention block of a layer that makes queries alone: keys and values are those of a layer before it.

Shapes: T tokens of the step, H hidden size, Hq query heads, D head size.
Invariant: such a layer is no `CacheUser`. What it reads was written in the same step, before it, so nothing but the
model knows that it reads it.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.attention import Attention
from quire.layers.base import Module, model_dtype
from quire.layers.linear import Linear
from quire.layers.qk_norm import QK_NORMS
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Span
from quire.layers.step import StepContext


class SharedKVAttention(Module):
    """Attention to the cache of `source`, with its window and scale (Brandon et al., 2024, arXiv:2405.12981)."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, source: Attention, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, heads = config.arch, Span(config.arch.num_heads, config.arch.head_dim)
        self.q_proj = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=arch.attention_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.q_proj",
            cut="output",
            spans=(heads,),
        )
        self.q_norm = None
        if arch.qk_norm is not None:
            self.q_norm = QK_NORMS[arch.qk_norm](config, arch.num_heads, f"{prefix}.q_norm")
        self.o_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=model_dtype(config),
            name=f"{prefix}.o_proj",
            cut="input",
        )
        self.rotary = rotary
        self.head_dim = arch.head_dim
        self._source = (source,)  # in a tuple it is no part of this module

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        (source,) = self._source
        q = self.q_proj(x, step).view(len(x), -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.rotary is not None:
            q = self.rotary.queries(positions, q)
        return self.o_proj(source.attend(q, step), step)
