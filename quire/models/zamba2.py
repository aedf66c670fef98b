# SPDX-License-Identifier: Apache-2.0
"""Zamba 2: Mamba 2 in all layers, some of them preceded by one of a few shared transformer blocks in turn.

Shapes: T tokens of the step, H hidden size.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Module, activation_dtype, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.mamba import Mamba2Mixer
from quire.layers.norm import block_norm
from quire.layers.shard import ShardSpan
from quire.layers.shared_block import SharedBlock, shared_blocks_of, span_linear
from quire.layers.step import StepContext
from quire.models.decoder import DecoderForCausalLM, rotaries_of
from quire.models.stack import OtherStageLayer, Stack


class MambaLayer(Module):
    """`x + mamba(norm(x + extra))`, where extra is a shared block's output or 0."""

    def __init__(self, *, config: EngineConfig, prefix: str, layer: int) -> None:
        super().__init__()
        self.input_layernorm = block_norm(config, f"{prefix}.input_layernorm")
        self.mamba = Mamba2Mixer(config=config, prefix=f"{prefix}.mamba", layer=layer, rotary=None)

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.mixed(x, None, positions, step)

    def mixed(self, x: Tensor, extra: Tensor | None, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H], and optionally an input that only Mamba gets -> [T, H]."""
        normed = self.input_layernorm(x if extra is None else x + extra)
        return x + self.mamba(normed, positions, step)


class HybridLayer(Module):
    """Layer preceded by a shared block; the block is a submodule of the first layer that uses it."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, turn: int, block: SharedBlock, is_first: bool
    ) -> None:
        super().__init__()
        hidden = config.arch.hidden_size
        self.turn, self.is_first = turn, is_first
        if is_first:
            self.shared_transformer = block
        self.linear = span_linear(config, f"{prefix}.linear", hidden, (ShardSpan(hidden),), "whole")
        self.mamba_decoder = MambaLayer(config=config, prefix=f"{prefix}.mamba_decoder", layer=layer)
        self._block = (block,)  # in a tuple, so that nn.Module does not register it

    @property
    def block(self) -> SharedBlock:
        """Shared block that the layer uses."""
        return self._block[0]

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x and the embeddings [T, H] -> [T, H]."""
        extra = self.linear(self.block(x, embedded, positions, self.turn, step), step)
        return self.mamba_decoder.mixed(x, extra, positions, step)


class OtherStageSharedBlock(OtherStageLayer):
    """Placeholder for a layer of another stage, holding a shared block that later layers of this stage use."""

    def __init__(self, block: SharedBlock) -> None:
        super().__init__()
        self.shared_transformer = block


class Zamba2Decoder(Stack):
    """Embeddings, layers and final norm.

    A stage passes on hidden states and embeddings. It keeps the shared blocks that its layers use, and their parts for
    those turns.
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
                        config=config, prefix=f"{at}.shared_transformer", turns=turns, rotary=rotaries[layer]
                    )
                )
            block = blocks[turn % own.count]
            self.layers.append(
                HybridLayer(config=config, prefix=at, layer=layer, turn=turn, block=block, is_first=is_first)
            )
        self.final_layernorm = block_norm(config, f"{prefix}.final_layernorm")

    def stream_size(self, layer: int) -> int:
        return 2 * self._hidden_size

    def apply_stage(self, own: range, shared: Collection[nn.Module]) -> None:
        taken = [layer for number, layer in enumerate(self.layers) if number in own]
        turns = {layer.turn for layer in taken if isinstance(layer, HybridLayer)}
        for layer in self.layers:
            if isinstance(layer, HybridLayer):
                layer.block.keep_turns(turns)
        super().apply_stage(own, shared)

    def placeholder(self, layer: int) -> Module:
        gone = self.layers[layer]
        block = gone.shared_transformer if isinstance(gone, HybridLayer) and gone.is_first else None
        return OtherStageLayer() if block is None or not block.turns else OtherStageSharedBlock(block)

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """See `CausalLM.forward`."""
        if self.enters:
            x = embedded = self.embed_tokens(inputs, step.adapter_rows)
        else:
            x, embedded = (part.contiguous() for part in self.received(step).chunk(2, dim=1))
        for _, layer in self.own_layers():
            x = layer(x, embedded, positions, step)
        return self.final_layernorm(x) if self.ends else torch.cat((x, embedded), dim=1)


class Zamba2ForCausalLM(DecoderForCausalLM):
    """Zamba 2's decoder with its output head."""

    decoder = Zamba2Decoder
