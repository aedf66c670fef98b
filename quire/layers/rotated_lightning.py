"""Lightning attention as Ring-linear has it (Ling team, 2025, arXiv:2510.19338): its heads are normed and rotated.

Shapes: T tokens of the step, H hidden size, h heads of size D.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.alibi import slopes
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.lightning_attention import LightningScan
from quire.layers.linear import Linear, QKVLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Span
from quire.layers.shared_norm import SharedRMSNorm
from quire.layers.step import StepContext


class RotatedLightningAttention(Module):
    """`out(norm(attention(qkv(x))) * sigmoid(gate(x)))`; the deeper the layer, the longer it remembers."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, own, dtype = config.arch, config.arch.rotated_lightning, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        heads = Span(arch.num_heads, own.head_dim)
        self.qkv_proj = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads.units,
            num_kv_heads=heads.units,
            head_dim=heads.unit,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.qkv_proj",
        )
        self.q_norm = self.k_norm = None
        if own.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    size=own.head_dim,
                    eps=arch.norm_eps,
                    dtype=activation_dtype(config),
                    name=f"{prefix}.{name}",
                )
                for name in ("q_norm", "k_norm")
            )
        self.rotary = rotary
        self.g_proj = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.g_proj",
            cut="output",
            spans=(heads,),
            activation="sigmoid",
        )
        self.g_norm = SharedRMSNorm(
            heads,
            groups=own.groups,
            eps=arch.norm_eps,
            dtype=activation_dtype(config),
            name=f"{prefix}.g_norm",
        )
        self.o_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            cut="input",
        )
        # The first layer's share is above 1, as in the code that these models were published with.
        share = 1.0 - (layer - 1) / max(arch.num_layers - 1, 1) + 1e-5
        rates = -share * slopes(heads.units)
        self.scan = LightningScan(
            config=config, heads=heads, rates=rates, scale=heads.unit**-0.5, name=prefix
        )

    def reads(self, source: RowSource) -> None:
        """x has two readers here, so nobody rounds it before."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj.heads(x, step)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k)
        out = self.g_norm(self.scan(q.flatten(1), k.flatten(1), v.flatten(1), step))
        return self.o_proj(out * self.g_proj(x, step), step)
