"""Decoder layers: the ways in which models put norms, attention and MLP around the residual stream.

Shapes: T tokens of the step, H hidden size.
Invariant: x is what the layer before still has to add to `residual`, so that the next norm does it in one pass; the
first layer gets no residual. What a block has inside is the config's affair, and its norms bear Llama's names.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource
from quire.layers.latent_self_attention import LatentSelfAttention
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.self_attention import SelfAttention
from quire.layers.sparse_mlp import SparseMLP
from quire.layers.step import StepContext

MLP = GatedMLP | PlainMLP | SparseMLP

MLPS: dict[str, type[MLP]] = {"gated": GatedMLP, "plain": PlainMLP, "sparse": SparseMLP}


class Block(Module):
    """What all have: `self_attn`, `mlp`, and norms by name."""

    norms: tuple[str, ...] = ()
    input_layernorm: RMSNorm | LayerNorm
    post_attention_layernorm: RMSNorm | LayerNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        attention = SelfAttention if config.arch.latent is None else LatentSelfAttention
        self.self_attn = attention(config=config, prefix=f"{prefix}.self_attn", layer=layer, rotary=rotary)
        self.mlp = MLPS[config.arch.mlp_of(layer)](config=config, prefix=f"{prefix}.mlp")
        for name in self.norms:
            setattr(self, name, block_norm(config, f"{prefix}.{name}"))
        self.multiplier = config.arch.residual_multiplier

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> those of the next layer."""
        raise NotImplementedError

    def _scaled(self, x: Tensor) -> Tensor:
        """What is added to the residual stream, which some models scale (Granite, MiniCPM)."""
        return x if self.multiplier == 1.0 else x * self.multiplier


class SequentialBlock(Block):
    """Attention and then the MLP, each on a normed copy of the residual stream (Llama, GPT-2 and most others)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        _connect(self.self_attn, self.input_layernorm)
        _connect(self.mlp, self.post_attention_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self._scaled(self.self_attn(x, positions, step))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self._scaled(self.mlp(x, step)), residual


class SandwichBlock(Block):
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
        _connect(self.self_attn, self.input_layernorm)
        _connect(self.mlp, self.pre_feedforward_layernorm)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self._scaled(self.post_attention_layernorm(self.self_attn(x, positions, step)))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, step))), residual


class NormAfterBlock(Block):
    """What attention and MLP make of the residual stream itself is normed (OLMo 2, Exaone 4)."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, positions, step))
        return self.post_feedforward_layernorm(self.mlp(x, step)), x


class ParallelBlock(Block):
    """Attention and MLP side by side on one normed copy of the residual stream (GPT-J, Phi, Cohere)."""

    norms = ("input_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn(x, positions, step) + self.mlp(x, step), residual


class ParallelTwoNormsBlock(Block):
    """Attention and MLP side by side, each with a norm of its own (GPT-NeoX, Falcon 40B)."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.self_attn(x, positions, step)
        return attended + self.mlp(self.post_attention_layernorm(residual), step), residual


BLOCKS: dict[str, type[Block]] = {
    "sequential": SequentialBlock,
    "sandwich": SandwichBlock,
    "norm_after": NormAfterBlock,
    "parallel": ParallelBlock,
    "parallel_two_norms": ParallelTwoNormsBlock,
}


def _connect(reader: SelfAttention | LatentSelfAttention | MLP, norm: Module) -> None:
    """Have a norm round its rows for the only layer that reads them, if it can."""
    if isinstance(norm, RowSource):
        reader.reads(norm)
