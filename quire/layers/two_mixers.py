"""Attention and Mamba 2 side by side, which read the same and are added up (Falcon-H1: TII, 2025, arXiv:2507.22448).

Shapes: T tokens of the step, H hidden size.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource
from quire.layers.mamba2 import Mamba2Mixer
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention
from quire.layers.step import StepContext


class TwoMixers(Module):
    """`attention(x * a) * b + mamba(x * c) * d`."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        assert config.arch.two_mixers is not None, "a layer of this kind is described"
        self.own = config.arch.two_mixers
        self.self_attn = SelfAttention(
            config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=rotary
        )
        self.mamba = Mamba2Mixer(config=config, prefix=f"{prefix}.mamba", layer=layer, rotary=None)

    def reads(self, source: RowSource) -> None:
        """x has two readers here, so nobody rounds it before."""

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        own = self.own
        attended = self.self_attn(x * own.attention_in, positions, step) * own.attention_out
        scanned = self.mamba(x * own.mamba_in, positions, step) * own.mamba_out
        return attended + scanned
