"""Zamba 2: Mamba 2 in all layers, and before some of them a transformer block, of which a few take turns.

Shapes: T tokens of the step, H hidden size.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.mamba2 import Mamba2Mixer
from quire.layers.norm import block_norm
from quire.layers.shard import Span
from quire.layers.shared_block import SharedBlock, shared_blocks_of, span_linear
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM, rotaries_of
from quire.models.stack import Elsewhere, Stack


class MambaLayer(Module):
    """`x + mamba(norm(x + told))`."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        self.input_layernorm = block_norm(config, f"{prefix}.input_layernorm")
        self.mamba = Mamba2Mixer(config=config, prefix=f"{prefix}.mamba", layer=layer, rotary=None)

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.told(x, None, positions, step)

    def told(self, x: Tensor, told: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H], and perhaps what Mamba alone sees added to it -> [T, H]."""
        normed = self.input_layernorm(x if told is None else x + told)
        return x + self.mamba(normed, positions, step)


class HybridLayer(Module):
    """A layer that takes a turn of a block; the block is part of the first layer that does."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, turn: int, block: SharedBlock, is_first: bool
    ) -> None:
        super().__init__()
        hidden = config.arch.hidden_size
        self.turn, self.is_first = turn, is_first
        if is_first:
            self.shared_transformer = block
        self.linear = span_linear(config, f"{prefix}.linear", hidden, (Span(hidden),), "whole")
        self.mamba_decoder = MambaLayer(config=config, prefix=f"{prefix}.mamba_decoder", layer=layer)
        self._block = (block,)  # in a tuple it is no part of this module

    @property
    def block(self) -> SharedBlock:
        """The one of which it takes a turn."""
        return self._block[0]

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x and the embeddings [T, H] -> [T, H]."""
        told = self.linear(self.block(x, embedded, positions, self.turn, step), step)
        return self.mamba_decoder.told(x, told, positions, step)


class BlockOfOthers(Elsewhere):
    """In the place of a layer that another stage has, with a block that it has here for layers behind it."""

    def __init__(self, block: SharedBlock) -> None:
        super().__init__()
        self.shared_transformer = block


class Zamba2Decoder(Stack):
    """Embeddings, layers and final norm.

    A stage hands on the hidden states and, beside them, the embeddings. It has those blocks of which its layers take
    turns, and of these what is for the turns.
    """

    leaving = ("final_layernorm",)

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch, own = config.arch, shared_blocks_of(config)
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            is_head=arch.tie_word_embeddings,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        rotaries, blocks = rotaries_of(config), list[SharedBlock]()
        self.layers = nn.ModuleList()
        for layer in range(arch.num_layers):
            at = f"{prefix}.layers.{layer}"
            if layer not in own.layers:
                self.layers.append(MambaLayer(config=config, prefix=at, layer=layer))
                continue
            turn = own.layers.index(layer)
            if is_first := turn < own.count:
                turns = range(turn, len(own.layers), own.count)
                blocks.append(
                    SharedBlock(
                        config=config,
                        prefix=f"{at}.shared_transformer",
                        turns=turns,
                        rotary=rotaries[layer],
                    )
                )
            block = blocks[turn % own.count]
            self.layers.append(
                HybridLayer(config=config, prefix=at, layer=layer, turn=turn, block=block, is_first=is_first)
            )
        self.final_layernorm = block_norm(config, f"{prefix}.final_layernorm")

    def stream_size(self, layer: int) -> int:
        return 2 * self._hidden_size

    def take_stage(self, own: range, shared: Collection[nn.Module]) -> None:
        taken = [layer for number, layer in enumerate(self.layers) if number in own]
        turns = {layer.turn for layer in taken if isinstance(layer, HybridLayer)}
        for layer in self.layers:
            if isinstance(layer, HybridLayer):
                layer.block.keep_turns(turns)
        super().take_stage(own, shared)

    def elsewhere(self, layer: int) -> Module:
        gone = self.layers[layer]
        block = gone.shared_transformer if isinstance(gone, HybridLayer) and gone.is_first else None
        return Elsewhere() if block is None or not block.turns else BlockOfOthers(block)

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """As `CausalLM.forward`."""
        if self.enters:
            x = embedded = self.embed_tokens(inputs, step.adapter_rows)
        else:
            x, embedded = (part.contiguous() for part in self.came(step).chunk(2, dim=1))
        for _, layer in self.own_layers():
            x = layer(x, embedded, positions, step)
        return self.final_layernorm(x) if self.ends else torch.cat((x, embedded), dim=1)


class Zamba2ForCausalLM(DecoderForCausalLM):
    """Zamba 2's decoder with its output head."""

    decoder = Zamba2Decoder
