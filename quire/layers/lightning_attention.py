"""Lightning attention (Qin et al., 2024, arXiv:2401.04658), as MiniMax-01 has it (2025, arXiv:2501.08313).

Linear attention, whose memory of keys and values decays as a whole, at each head's own rate. That is the recurrence of
Mamba 2 with time steps of 1 and a group for each head: what it writes at is the key, what it reads at the query.

Shapes: T tokens of the step, H hidden size, h heads of size D.
"""

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import ops
from quire.layers.alibi import slopes
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.linear import Linear, QKVLinear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Shard, Span
from quire.layers.shared_norm import SharedRMSNorm
from quire.layers.states import StateCache
from quire.layers.step import StepContext

_NORM_EPS = 1e-6


class LightningScan(Module):
    """What heads have seen, as it decays at `rates` [h], below 0, read at their queries; `name` is the layer's."""

    rates: Tensor
    zeros: Tensor

    def __init__(
        self, *, config: EngineConfig, heads: Span, rates: Tensor, scale: float = 1.0, name: str
    ) -> None:
        super().__init__()
        self.units, self.scale, self.name = Span(heads.units), scale, name
        # Values are scaled as time steps of another length would.
        self.register_buffer("rates", rates / scale, persistent=False)
        self.register_buffer("zeros", torch.zeros_like(rates), persistent=False)
        parts = [((self.units,), heads.unit, heads.unit)]
        self.cache = StateCache(config=config, name=f"{name}.cache", parts=parts)

    def take_share(self, shard: Shard) -> None:
        own = self.units.piece(shard, self.name)
        self.rates, self.zeros = self.rates[own], self.zeros[own]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepContext) -> Tensor:
        """q, k and v [T, h * D] of a rank's heads -> [T, h * D]."""
        metadata, (states,) = self.cache.metadata(step), self.cache.views
        heads = len(self.rates)
        return ops.ssd_scan(
            v,
            torch.zeros_like(v[:, :heads]),
            self.rates,
            k,
            q,
            self.zeros,
            self.zeros,
            None,
            states,
            metadata,
            groups=heads,
            time_limits=(self.scale, self.scale),
        )


class LightningAttention(Module):
    """`out(norm(attention(silu(qkv(x)))) * sigmoid(gate(x)))`; the deeper the layer, the longer it remembers."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, dtype, heads = (
            config.arch,
            model_dtype(config),
            Span(config.arch.num_heads, config.arch.head_dim),
        )
        self.lightning_qkv = QKVLinear(
            hidden_size=arch.hidden_size,
            num_heads=heads.units,
            num_kv_heads=heads.units,
            head_dim=heads.unit,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.lightning_qkv",
            grouped=True,
        )
        self.output_gate = Linear(
            in_features=arch.hidden_size,
            out_features=heads.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.output_gate",
            cut="output",
            spans=(heads,),
            activation="sigmoid",
        )
        self.norm = SharedRMSNorm(heads, eps=_NORM_EPS, dtype=activation_dtype(config), name=f"{prefix}.norm")
        self.out_proj = Linear(
            in_features=heads.size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            cut="input",
        )
        share = 1.0 - layer / (arch.num_layers - 1 + 1e-5) + 1e-5
        self.scan = LightningScan(config=config, heads=heads, rates=-share * slopes(heads.units), name=prefix)

    def reads(self, source: RowSource) -> None:
        """x has two readers here, so nobody rounds it before."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = ops.activate(self.lightning_qkv(x, step), "silu").chunk(3, dim=1)
        return self.out_proj(self.norm(self.scan(q, k, v, step)) * self.output_gate(x, step), step)
