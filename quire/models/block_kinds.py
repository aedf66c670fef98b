# SPDX-License-Identifier: Apache-2.0
"""Table of decoder blocks, and the blocks of fewer families: other places of norms, or a mixer or an MLP alone.

T tokens of the step, H hidden size. A block adds to the residual stream as in `quire/models/blocks.py`.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext
from quire.models.blocks import Block, HalvedBlock, SequentialBlock, connect_reader


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
        connect_reader(self.mixer, self.input_layernorm)
        connect_reader(self.mlp, self.pre_feedforward_layernorm)

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
        connect_reader(self.mixer, self.input_layernorm)
        connect_reader(self.residual_mlp, self.residual_layernorm)

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
        connect_reader(self.mixer, self.input_layernorm)

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
        connect_reader(self.mlp, self.input_layernorm)

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
