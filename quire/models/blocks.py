# SPDX-License-Identifier: Apache-2.0
"""Decoder blocks: how models place norms, attention and MLP around the residual stream.

Shapes: T tokens of the step, H hidden size.
Invariant: x still has to be added to `residual`, so that the next norm does it in one pass; the first layer gets no
residual. The config selects a block's mixer and MLP, and its norms have Llama's names.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource
from quire.layers.experts import SparseMLP
from quire.layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from quire.layers.latent_attention import LatentSelfAttention
from quire.layers.lightning_attention import LightningAttention, RotatedLightningAttention
from quire.layers.mamba import Mamba2Mixer, MambaMixer, PLaMo2Mamba, RecurrentUnit, ShortConv
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import (
    DifferentialAttention,
    MixtureOfAttention,
    ParallelAttentionMamba,
    SelfAttention,
)
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
        _connect(self.mixer, self.input_layernorm)
        _connect(self.mlp, self.post_attention_layernorm)

    def mix(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self._scaled(self.mixer(x, positions, step)), residual

    def feed(self, x: Tensor, residual: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self._scaled(self.mlp(x, step)), residual


class SandwichBlock(HalvedBlock):
    """Attention and then the MLP, each between two norms (Gemma 2, GLM-4)."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        _connect(self.mixer, self.input_layernorm)
        _connect(self.mlp, self.pre_feedforward_layernorm)

    def mix(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self._scaled(self.post_attention_layernorm(self.mixer(x, positions, step))), residual

    def feed(self, x: Tensor, residual: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, step))), residual


class NormAfterBlock(Block):
    """Attention and MLP on the residual stream itself, with normed outputs (OLMo 2, Exaone 4)."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.mixer(x, positions, step))
        return self.post_feedforward_layernorm(self.mlp(x, step)), x


class NormedStreamBlock(Block):
    """Attention and then the MLP; the residual is the normed stream, and both are scaled (MiniMax-01)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        scales = config.arch.stream_scales
        self.of_mixer, self.of_mlp = scales[config.arch.layer_types[layer]], scales["mlp"]

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, _ = self.input_layernorm.add(x, residual)
        kept, made = self.of_mixer
        x = self.post_attention_layernorm(x * kept + self.mixer(x, positions, step) * made)
        kept, made = self.of_mlp
        return self.mlp(x, step) * made, x * kept


class PostNormBlock(Block):
    """Attention and then the MLP, each with the norm after its residual addition (BERT)."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with nothing left to add."""
        x, _ = self.post_attention_layernorm.add(self.mixer(x, positions, step), x)
        x, _ = self.post_feedforward_layernorm.add(self.mlp(x, step), x)
        return x, None


class NormedInputBlock(Block):
    """Attention on the output of the embeddings' norm, then the MLP on a normed copy (ModernBERT's first layer)."""

    norms = ("post_attention_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        assert residual is None, "it is a first layer"
        x, residual = self.post_attention_layernorm.add(self.mixer(x, positions, step), x)
        return self.mlp(x, step), residual


class ParallelBlock(Block):
    """Attention and MLP in parallel on one normed copy of the residual stream (GPT-J, Phi, Cohere)."""

    norms = ("input_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.mixer(x, positions, step) + self.mlp(x, step), residual


class ParallelTwoNormsBlock(Block):
    """Attention and MLP in parallel, each with its own norm (GPT-NeoX, Falcon 40B)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.mixer(x, positions, step)
        return attended + self.mlp(self.post_attention_layernorm(residual), step), residual


class ResidualExpertsBlock(Block):
    """Attention, then a dense MLP, and in parallel experts on a normed copy of the layer's input (Arctic)."""

    norms = ("input_layernorm", "post_attention_layernorm", "residual_layernorm")
    residual_layernorm: RMSNorm | LayerNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        self.residual_mlp = GatedMLP(config=config, prefix=f"{prefix}.residual_mlp")
        _connect(self.mixer, self.input_layernorm)
        _connect(self.residual_mlp, self.residual_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.mixer(x, positions, step)
        beside = self.mlp(self.post_attention_layernorm(residual), step)
        x, residual = self.residual_layernorm.add(attended, residual)
        return self.residual_mlp(x, step) + beside, residual


class MixerBlock(Block):
    """Mixer only, on a normed copy of the residual stream (Mamba)."""

    norms = ("input_layernorm",)
    has_mlp = False

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        _connect(self.mixer, self.input_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.mixer(x, positions, step), residual


class MLPBlock(Block):
    """MLP only, in models whose mixers are separate layers."""

    norms = ("input_layernorm",)
    has_mixer = False

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        _connect(self.mlp, self.input_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.mlp(x, step), residual


class EmptyBlock(Block):
    """Empty layer, from which architecture search removed attention and MLP (Nemotron-NAS)."""

    has_mixer = has_mlp = False

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        return x, residual


BLOCKS: dict[str, type[Block]] = {
    "sequential": SequentialBlock,
    "sandwich": SandwichBlock,
    "norm_after": NormAfterBlock,
    "normed_stream": NormedStreamBlock,
    "post_norm": PostNormBlock,
    "normed_input": NormedInputBlock,
    "parallel": ParallelBlock,
    "parallel_two_norms": ParallelTwoNormsBlock,
    "residual_experts": ResidualExpertsBlock,
    "mixer": MixerBlock,
    "mlp": MLPBlock,
    "empty": EmptyBlock,
}


def _connect(reader: Mixer | MLP, norm: Module) -> None:
    """Let a norm quantize its rows for the only layer that reads them, if it can."""
    if isinstance(norm, RowSource):
        reader.reads(norm)
