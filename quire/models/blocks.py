# SPDX-License-Identifier: Apache-2.0
"""Decoder blocks: how models place norms, attention and MLP around the residual stream.

Shapes: T tokens of the step, H hidden size.
Invariant: x still has to be added to `residual`, so that the next norm does it in one pass; the first layer gets no
residual. The config selects a block's mixer and MLP, and its norms have Llama's names.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.attention_variants import DifferentialAttention, MixtureOfAttention, ParallelAttentionMamba
from quire.layers.base import Module, RowSource
from quire.layers.experts import SparseMLP
from quire.layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from quire.layers.latent_attention import LatentSelfAttention
from quire.layers.lightning_attention import LightningAttention, RotatedLightningAttention
from quire.layers.mamba import Mamba2Mixer, MambaMixer, PLaMo2Mamba, RecurrentUnit, ShortConv
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention
from quire.layers.step import StepContext

Mixer = (
    SelfAttention
    | LatentSelfAttention
    | DifferentialAttention
    | MixtureOfAttention
    | MambaMixer
    | Mamba2Mixer
    | PLaMo2Mamba
    | ParallelAttentionMamba
    | ShortConv
    | GatedDeltaNet
    | KimiDeltaAttention
    | LightningAttention
    | RotatedLightningAttention
    | RecurrentUnit
)
MLP = GatedMLP | PlainMLP | SparseMLP

MIXERS: dict[str, tuple[str, type[Mixer]]] = {
    "full_attention": ("self_attn", SelfAttention),
    "sliding_attention": ("self_attn", SelfAttention),
    "chunked_attention": ("self_attn", SelfAttention),
    "latent_attention": ("self_attn", LatentSelfAttention),
    "differential_attention": ("self_attn", DifferentialAttention),
    "mixture_of_attention": ("self_attn", MixtureOfAttention),
    "mamba": ("mamba", MambaMixer),
    "mamba2": ("mamba", Mamba2Mixer),
    "plamo2_mamba": ("mamba", PLaMo2Mamba),
    "attention_and_mamba2": ("mixers", ParallelAttentionMamba),
    "short_conv": ("conv", ShortConv),
    "lightning": ("self_attn", LightningAttention),
    "rotated_lightning": ("self_attn", RotatedLightningAttention),
    "gated_delta": ("linear_attn", GatedDeltaNet),
    "kimi_delta": ("self_attn", KimiDeltaAttention),
    "recurrent_unit": ("recurrent_unit", RecurrentUnit),
}
"""Token mixers by layer kind: (name in the layer, class)."""

MLPS: dict[str, type[MLP]] = {"gated": GatedMLP, "plain": PlainMLP, "sparse": SparseMLP}


class Block(Module):
    """Base of blocks: norms by name, and by default a token mixer and `mlp`."""

    norms: tuple[str, ...] = ()
    has_mixer = has_mlp = True
    input_layernorm: RMSNorm | LayerNorm
    post_attention_layernorm: RMSNorm | LayerNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        if self.has_mixer:
            name, kind = MIXERS[config.arch.layer_types[layer]]
            mixer = kind(config=config, prefix=f"{prefix}.{name}", layer=layer, rotary=rotary)
            self.add_module(name, mixer)
            self.mixer_name = name
        if self.has_mlp:
            self.mlp = MLPS[config.arch.mlp_of(layer)](config=config, prefix=f"{prefix}.mlp")
        for name in self.norms:
            setattr(self, name, block_norm(config, f"{prefix}.{name}"))
        self.multiplier = config.arch.residual_multiplier

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """x and residual [T, H] -> those of the next layer."""
        raise NotImplementedError

    @property
    def mixer(self) -> Mixer:
        """Token mixer."""
        return self._modules[self.mixer_name]  # type: ignore[return-value]

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x times the residual multiplier of some models (Granite, MiniCPM)."""
        return x if self.multiplier == 1.0 else x * self.multiplier


class HalvedBlock(Block):
    """Block that mixes tokens and then processes rows separately, so that unread rows can be skipped."""

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.mix(x, residual, positions, step)
        return self.feed(x, residual, step)

    def mix(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Block input [T, H] -> input of `feed`."""
        raise NotImplementedError

    def feed(self, x: Tensor, residual: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Any rows of `mix`'s output -> input of the next layer."""
        raise NotImplementedError


class SequentialBlock(HalvedBlock):
    """Attention and then the MLP, each on a normed copy of the residual stream (Llama, GPT-2 and most others)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        connect_reader(self.mixer, self.input_layernorm)
        connect_reader(self.mlp, self.post_attention_layernorm)

    def mix(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self._scaled(self.mixer(x, positions, step)), residual

    def feed(self, x: Tensor, residual: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self._scaled(self.mlp(x, step)), residual


def connect_reader(reader: Mixer | MLP, norm: Module) -> None:
    """Let a norm quantize its rows for the only layer that reads them, if it can."""
    if isinstance(norm, RowSource):
        reader.reads(norm)
