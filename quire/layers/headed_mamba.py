"""Mamba 2's heads, chosen for as Mamba chooses: by what the convolution gave (PLaMo 2; Preferred Networks, 2025).

Shapes: T tokens of the step, H hidden size, h heads of size D, N states of each.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.causal_conv import CausalConv
from quire.layers.head_norm import HeadRMSNorm
from quire.layers.linear import Linear
from quire.layers.mamba2 import HeadScan
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Span
from quire.layers.states import StateCache
from quire.layers.step import StepContext


class HeadedMambaMixer(Module):
    """`out(scan(conv(x)) * silu(z))`, where `in_proj` makes each head's z and x, and `x_proj` what else the scan reads.

    All heads have b and c in common, which are normed, as is that of which their time steps are made.
    """

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        own, hidden, dtype = config.arch.headed_mamba, config.arch.hidden_size, model_dtype(config)
        assert own is not None, "a layer of this kind is described"
        heads, channels = Span(own.heads), Span(own.heads, own.head_dim)
        self.in_proj = Linear(
            in_features=hidden,
            out_features=2 * channels.size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.in_proj",
            cut="output",
            spans=(channels, channels),
            groups=own.heads,
        )
        self.conv1d = CausalConv(
            spans=(channels,), taps=own.taps, bias=False, silu=True, name=f"{prefix}.conv1d"
        )
        self.widths = [own.states, own.states, own.rank]
        self.x_proj = Linear(
            in_features=channels.size,
            out_features=sum(self.widths),
            bias=False,
            dtype=dtype,
            name=f"{prefix}.x_proj",
            cut="input",
        )
        self.b_norm, self.c_norm, self.dt_norm = (
            HeadRMSNorm(
                size=size, eps=config.arch.norm_eps, dtype=activation_dtype(config), name=f"{prefix}.{name}"
            )
            for name, size in zip(("b_norm", "c_norm", "dt_norm"), self.widths, strict=True)
        )
        self.dt_proj = Linear(
            in_features=own.rank,
            out_features=own.heads,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.dt_proj",
            cut="output",
            spans=(heads,),
        )
        self.scan = HeadScan(
            heads=own.heads, groups=1, time_limits=(0.0, float("inf")), name=f"{prefix}.scan"
        )
        self.out_proj = Linear(
            in_features=channels.size,
            out_features=hidden,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.out_proj",
            cut="input",
        )
        parts = [(own.taps - 1, (channels,)), ((heads,), own.states, own.head_dim)]
        self.cache = StateCache(config=config, name=f"{prefix}.cache", parts=parts)

    def reads(self, source: RowSource) -> None:
        """As `SelfAttention.reads`."""
        self.in_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        metadata, (conv_states, states) = self.cache.metadata(step), self.cache.views
        gate, x = self.in_proj(x, step).chunk(2, 1)
        x = self.conv1d(x, conv_states, metadata)
        b, c, dt = self.x_proj(x, step).split(self.widths, 1)
        dt = self.dt_proj(self.dt_norm(dt), step)
        out = self.scan(x, dt, self.b_norm(b), self.c_norm(c), gate, states, metadata)
        return self.out_proj(out, step)
