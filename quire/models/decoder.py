# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformer as its `ModelArch` describes it: the class of most families, each a reader in `families/`.

Shapes: T tokens of the step, H hidden size, N rows of logits, V vocabulary rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import EngineConfig, ModelArch
from quire.layers.base import activation_dtype, model_dtype
from quire.layers.embedding import PositionEmbedding, SinusoidalEmbedding, VocabEmbedding
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step import StepContext
from quire.models.base import CausalLM, output_head
from quire.models.block_kinds import BLOCKS
from quire.models.blocks import HalvedBlock
from quire.models.stack import Stack

POSITIONS: dict[str, type[PositionEmbedding] | type[SinusoidalEmbedding]] = {
    "learned": PositionEmbedding,
    "sinusoidal": SinusoidalEmbedding,
}


def crossing_layers(arch: ModelArch) -> tuple[int, ...]:
    """Return the layers whose inputs are kept for draft models and cross stages: all but the input of the last norm."""
    return tuple(layer for layer in sorted(set(arch.kept_layers)) if layer < arch.num_layers)


class Decoder(Stack):
    """Embeddings, decoder layers and final norm.

    A stage passes on the residual stream, the states that layers so far have kept for a draft model, and the inputs of
    layers where skips start.
    """

    takes_media = True

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__(config=config)
        arch = config.arch
        self.embed_tokens = VocabEmbedding(
            vocab_size=arch.vocab_size,
            size=arch.hidden_size,
            dtype=model_dtype(config),
            scale=arch.embedding_multiplier,
            is_head=arch.tie_word_embeddings and config.pooling is None,
            out_dtype=activation_dtype(config),
            name=f"{prefix}.embed_tokens",
        )
        self.embed_positions = self.embed_norm = None
        if arch.positions is not None:
            self.embed_positions = POSITIONS[arch.positions](
                config=config, offset=arch.position_offset, name=f"{prefix}.embed_positions"
            )
        if arch.embedding_norm:
            self.embed_norm = block_norm(config, f"{prefix}.embed_norm")
        rotaries = rotaries_of(config)
        self.layers = nn.ModuleList(
            BLOCKS[arch.block_of(layer)](
                config=of_layer(config, layer),
                prefix=f"{prefix}.layers.{layer}",
                layer=layer,
                rotary=rotaries[layer],
            )
            for layer in range(arch.num_layers)
        )
        self.norm: RMSNorm | LayerNorm | None = block_norm(config, f"{prefix}.norm", arch.final_norm_eps)
        self.kept_layers = arch.kept_layers
        self.skips = arch.skips
        self._crossing = crossing_layers(arch)
        self._skipped_from = tuple(sorted({skip.start for skip in arch.skips}))
        self._halved = self._halved_layer(config)
        self._deepened = 0 if arch.part_of is None else arch.part_of.deepstack_layers

    def joined(self) -> Collection[int]:
        """Return the layers behind those whose output takes features of an image: they are in the first stage."""
        return range(1, min(self._deepened, len(self.layers)))

    def _halved_layer(self, config: EngineConfig) -> int | None:
        """Return the last layer's number if its second half can skip rows that are not read."""
        arch, last = config.arch, len(self.layers) - 1
        is_plain = not arch.kept_layers and not arch.skips and not config.parallel.enable_expert_parallel
        return last if is_plain and isinstance(self.layers[last], HalvedBlock) else None

    def stream_size(self, layer: int) -> int:
        return self._hidden_size * (1 + len(self._crossing) + len(self._skipped_from))

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Return hidden states, or in stages before the last the input of the next stage."""
        (x, kept, streams), residual = self._entering(inputs, positions, step), None
        for number, layer in self.own_layers():
            if self.skips:
                x, residual = self._skipping(number, x, residual, streams)
            if number in self.kept_layers:
                kept[number] = x if residual is None else x + residual
            if step.wanted is not None and number == self._halved and number >= self._deepened:
                return self._of_wanted(step.wanted, x, residual, positions, step)
            x, residual = layer(x, residual, positions, step)
            if step.media is not None and number < len(step.media.deepstack):
                x = x.index_add(0, step.media.rows, step.media.deepstack[number].to(x.dtype))
        if self.norm is None:  # in a later stage
            return self._handed_on(x if residual is None else x + residual, kept, streams)
        if len(self.layers) in self.kept_layers:
            kept[len(self.layers)] = x if residual is None else x + residual
        hidden, _ = self.norm.add(x, residual)
        return torch.cat((hidden, *kept.values()), dim=-1) if kept else hidden

    def _of_wanted(
        self, wanted: Tensor, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> Tensor:
        """Compute the last layer's second half and the norm for some rows; all rows have written keys and values."""
        last = self.layers[-1]
        assert isinstance(last, HalvedBlock), "as `_halved` says"
        assert self.norm is not None, "the stage with the last layer has the norm"
        x, residual = last.mix(x, residual, positions, step)
        hidden = torch.zeros_like(x)
        if len(wanted):
            some, of_stream = last.feed(x.index_select(0, wanted), residual.index_select(0, wanted), step)
            hidden.index_copy_(0, wanted, self.norm.add(some, of_stream)[0])
        return hidden

    def _skipping(
        self, number: int, x: Tensor, residual: Tensor | None, streams: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a layer's input with skips; `streams` has the inputs of layers where skips start."""
        ends = [skip for skip in self.skips if skip.end == number]
        if not ends and all(skip.start != number for skip in self.skips):
            return x, residual
        x = streams[number] = x if residual is None else x + residual
        for skip in ends:
            x = streams[skip.start] * skip.share + x * (1.0 - skip.share)
        return x, None

    def _entering(
        self, inputs: Tensor, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
        """Return the input of the stage's first layer [T, H], kept states of earlier layers, and inputs of layers where
        skips start.
        """
        if self.enters:
            return self._embedded(inputs, positions, step), {}, {}
        stream = self.received(step)
        if not self._crossing and not self._skipped_from:
            return stream, {}, {}
        x, *found = stream.split(self._hidden_size, dim=-1)
        kept = zip(self._crossing, found, strict=False)
        skipped = zip(self._skipped_from, found[len(self._crossing) :], strict=True)
        return x.contiguous(), self._so_far(kept), self._so_far(skipped)

    def _so_far(self, rows: Iterable[tuple[int, Tensor]]) -> dict[int, Tensor]:
        """Return the rows of layers before these; rows for later layers are undefined yet."""
        return {number: one.contiguous() for number, one in rows if number < self.own.start}

    def _handed_on(self, x: Tensor, kept: dict[int, Tensor], streams: dict[int, Tensor]) -> Tensor:
        """Return [T, `stream_size`]; columns for later layers' kept states are undefined."""
        if not self._crossing and not self._skipped_from:
            return x
        more = [kept.get(number, x) for number in self._crossing]
        more += [streams.get(number, x) for number in self._skipped_from]
        return torch.cat((x, *more), dim=-1)

    def _embedded(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x: Tensor = self.embed_tokens(inputs, step.adapter_rows)
        if step.media is not None:
            x = x.index_copy(0, step.media.rows, step.media.values.to(x.dtype))
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        return x if self.embed_norm is None else self.embed_norm(x)


def _of_kind(config: EngineConfig, kind: str) -> EngineConfig:
    """Return the config for the first layer of a kind; layers of a kind have heads of one size."""
    types = config.arch.layer_types
    return of_layer(config, types.index(kind)) if kind in types else config


def of_layer(config: EngineConfig, layer: int) -> EngineConfig:
    """Return the config for one layer of a model."""
    arch = config.arch.of_layer(layer)
    return config if arch is config.arch else dataclasses.replace(config, model_arch=arch)


def rotaries_of(config: EngineConfig) -> list[RotaryEmbedding | None]:
    """Return each layer's rotary embedding; layers with the same formula share one."""
    arch = config.arch
    if arch.rope is None:
        return [None] * arch.num_layers
    rotary = RotaryEmbedding(config=_of_kind(config, "full_attention"), rope=arch.rope)
    local = rotary
    if arch.rope_local is not None:
        local = RotaryEmbedding(config=_of_kind(config, "sliding_attention"), rope=arch.rope_local)
    by_type = {
        "full_attention": rotary,
        "sliding_attention": local,
        "chunked_attention": rotary,
        "latent_attention": rotary,
        "differential_attention": rotary,
        "mixture_of_attention": rotary,
        "attention_and_mamba2": rotary,
        "rotated_lightning": local,
    }
    return [
        None if layer in arch.unrotated_layers else by_type.get(kind)
        for layer, kind in enumerate(arch.layer_types)
    ]


class DecoderForCausalLM(CausalLM):
    """Decoder with its output head."""

    decoder: type[Any] = Decoder
    """Class below the head: it has `embed_tokens`, and the same forward signature."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        names = config.arch.names
        self.merged, self.renamed, self.unused = names.merged, names.renamed, names.unused
        self.base_prefix = names.renamed.get("model", "model") + "."
        self.model = self.decoder(config=config, prefix=f"{prefix}model")
        self.lm_head = output_head(config, self.model.embed_tokens, f"{prefix}lm_head")

    def stack(self) -> Stack | None:
        return self.model if isinstance(self.model, Stack) else None

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        hidden: Tensor = self.model(inputs, positions, step)
        return hidden

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return self._scaled(super().compute_logits(self._last_rows(hidden), adapter_rows, num_added))

    def shared_head(self) -> VocabEmbedding | None:
        head = self.lm_head
        return None if head is None or head.group is None else head

    def own_logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None, "the sampling stage has a head"
        return self._scaled(self.lm_head.own_logits(self._last_rows(hidden)))

    def _last_rows(self, hidden: Tensor) -> Tensor:
        """Return hidden states without those kept for a draft model."""
        arch = self.config.arch
        return hidden[:, : arch.hidden_size].contiguous() if arch.kept_layers else hidden

    def _scaled(self, logits: Tensor) -> Tensor:
        arch, cap = self.config.arch, self.config.arch.final_logit_softcap
        if arch.logits_multiplier != 1.0:
            logits = logits * arch.logits_multiplier
        return logits if cap is None else cap * torch.tanh(logits / cap)
