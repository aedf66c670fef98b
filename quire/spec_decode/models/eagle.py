# SPDX-License-Identifier: Apache-2.0
"""Draft heads: EAGLE, EAGLE-3, MTP (autoregressive) and Medusa.

- EAGLE (Li et al., 2024, arXiv:2401.15077) reads the output of the target's last norm.
- EAGLE-3 (Li et al., 2025, arXiv:2503.01840) reads the inputs of three target layers and has its own output head,
  perhaps of fewer tokens.
- MTP (multi-token prediction; DeepSeek-V3, 2024, arXiv:2412.19437): `block(eh_proj([norm(embedding), norm(state)]))`.
  Only the checkpoint's first such layer is used; it drafts further tokens from its own states. `MTPArch` has the
  variants of families.
- Medusa (Cai et al., 2024, arXiv:2401.10774): each head drafts one token, the first that after the next.

Shapes: T tokens of the step, N rows, H hidden size, W size of the target's states read per token, D tokens of the
head, V tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import CheckpointNames, DraftArch
from quire.errors import UnsupportedModelError
from quire.layers.base import Layer, Module, model_dtype, parameter
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.block_kinds import BLOCKS
from quire.models.blocks import Block
from quire.models.decoder import DecoderForCausalLM, rotaries_of

STATES = "states"  # key of `StepContext.intermediate`: [T, H] hidden state before each token


class AutoregressiveHead(CausalLM):
    """Base of autoregressive heads: (token embedding, previous hidden state) -> next hidden state.

    Logits come from the target's lm_head or the head's own. The embedding is the target's; modules are named as in the
    checkpoint. The key and value of token i + 1 are at position i of the KV cache, that of the state it is read with.
    """

    base_prefix = ""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.lm_head = None
        self._target: tuple[DecoderForCausalLM, ...] = ()

    @property
    def draft(self) -> DraftArch:
        """Draft part of the architecture."""
        assert self.config.arch.draft is not None, "draft heads have a DraftArch"
        return self.config.arch.draft

    @property
    def target(self) -> DecoderForCausalLM:
        """Target model."""
        return self._target[0]

    def share(self, target: CausalLM) -> None:
        """Share the target's embedding and output head; called once, when both are loaded."""
        assert isinstance(target, DecoderForCausalLM), "checked at startup"
        self._target = (target,)  # in a tuple, so that it is not registered as a submodule

    def read(self, rows: Tensor) -> Tensor:
        """Map the target's states [N, W] to states [N, H]."""
        return rows

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Map token ids [T], with the states before them in `step.intermediate`, to the next states [T, H]."""
        assert step.intermediate is not None, "draft heads need hidden states"
        embedded = self.target.model.embed_tokens(inputs)
        return self.behind(embedded, step.intermediate[STATES], positions, step)

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Map token embeddings and the states before them, all [T, H], to the next states."""
        raise NotImplementedError

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return self.target.compute_logits(hidden, adapter_rows, num_added)


class MTPHead(AutoregressiveHead):
    """Layer like the target's last one; its states are normed for the target's output head."""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch, size = config.arch, config.arch.hidden_size
        self.mtp = arch.mtp
        self.merged, self.renamed, self.unused = arch.names.merged, arch.names.renamed, arch.names.unused
        self.enorm = block_norm(config, f"{prefix}enorm")
        self.hnorm = block_norm(config, f"{prefix}hnorm")
        self.eh_proj = Linear(
            in_features=2 * size,
            out_features=size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}eh_proj",
        )
        (rotary,) = rotaries_of(config)
        block = BLOCKS[arch.block_of(0)]
        self.block = block(config=config, prefix=f"{prefix}block", layer=0, rotary=rotary)
        self.head_norm = block_norm(config, f"{prefix}head_norm")

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        parts = (self.enorm(embedded), self.hnorm(states))
        joined = self.eh_proj(torch.cat(parts[::-1] if self.mtp.state_first else parts, dim=-1), step)
        x, residual = self.block(joined, None, positions, step)
        return self.head_norm.add(x, residual)[0] if self.mtp.gives_normed else torch.add(x, residual)

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return super().compute_logits(
            hidden if self.mtp.gives_normed else self.head_norm(hidden), adapter_rows, num_added
        )


_NO_STEP = StepContext(groups=())  # for layers without per-request state


class ResidualBlocks(Module):
    """`x + silu(linear(x))`, one after the other."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, draft = config.arch, config.arch.draft
        assert draft is not None, "draft heads have a DraftArch"
        self.layers = nn.ModuleList(
            Linear(
                in_features=arch.hidden_size,
                out_features=arch.hidden_size,
                bias=draft.bias,
                dtype=model_dtype(config),
                name=f"{prefix}.layers.{layer}",
                activation="silu",
            )
            for layer in range(arch.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        for layer in self.layers:
            x = x + layer(x, _NO_STEP)
        return x


class MedusaHeads(CausalLM):
    """Medusa's heads, which read the output of the target's last norm."""

    base_prefix = ""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch, draft = config.arch, config.arch.draft
        assert draft is not None, "draft heads have a DraftArch"
        self.lm_head = None
        self.blocks = nn.ModuleList(
            ResidualBlocks(config=config, prefix=f"{prefix}blocks.{head}") for head in range(draft.count)
        )
        self.lm_heads = nn.ModuleList(
            VocabEmbedding(
                vocab_size=arch.vocab_size,
                size=arch.hidden_size,
                dtype=model_dtype(config),
                is_head=True,
                name=f"{prefix}lm_heads.{head}",
            )
            for head in range(draft.count)
        )
        self.is_numbered = draft.is_numbered

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Map hidden states [N, H] to a head's logits, float32 [N, V]."""
        table = self.lm_heads[head]
        assert isinstance(table, VocabEmbedding)
        return table.logits(self.blocks[head](hidden))

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """Yield layers under the authors' names: head and block are numbers, a block's weight is called linear."""
        for names, layer in super().checkpoint_layers():
            yield [self._numbered(name) for name in names] if self.is_numbered else names, layer

    def _numbered(self, name: str) -> str:
        kind, head, *rest = name.split(".")
        return f"{head}.{rest[-1]}.linear" if kind == "blocks" else f"{head}.{self.config.arch.num_layers}"


_MERGED = CheckpointNames().merged


class EagleBlock(Block):
    """Llama layer without a norm before attention."""

    norms = ("post_attention_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        attended = self.mixer(x, positions, step)
        x, residual = self.post_attention_layernorm.add(attended, x)
        return self.mlp(x, step), residual


class Eagle3Block(Block):
    """Llama layer whose attention reads embeddings and states, normed separately."""

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    hidden_norm: RMSNorm | LayerNorm

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(config=config, prefix=prefix, layer=layer, rotary=rotary)
        self.adds_normed = config.arch.draft is not None and config.arch.draft.adds_normed

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Run the layer: `x` are embeddings, `residual` states, [T, H]."""
        assert residual is not None, "the first layer gets states"
        normed = self.hidden_norm(residual)
        attended = self.mixer(torch.cat((self.input_layernorm(x), normed), dim=-1), positions, step)
        x, residual = self.post_attention_layernorm.add(attended, normed if self.adds_normed else residual)
        return self.mlp(x, step), residual


class EagleHead(AutoregressiveHead):
    """EAGLE: `layers(fc([embedding, state]))`; the last residual sum is the state, without a norm.

    Layers after the first are plain Llama layers.
    """

    merged = _MERGED
    unused: tuple[str, ...] = (
        r"^embed_tokens\.",
        r"^lm_head\.",
        r"^layers\.0\.input_layernorm\.",
        r"\.inv_freq$",
    )

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        size = config.arch.hidden_size
        self.fc = Linear(
            in_features=2 * size,
            out_features=size,
            bias=self.draft.bias,
            dtype=model_dtype(config),
            name=f"{prefix}fc",
        )
        self.layers = nn.ModuleList(
            (BLOCKS["sequential"] if layer else EagleBlock)(
                config=config, prefix=f"{prefix}layers.{layer}", layer=layer, rotary=rotary
            )
            for layer, rotary in enumerate(rotaries_of(config))
        )

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = self.fc(torch.cat((embedded, states), dim=-1), step), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, step)
        assert residual is not None, "there is at least one layer"
        return torch.add(x, residual)


class Eagle3Head(AutoregressiveHead):
    """EAGLE-3: `midlayer(embedding, state)`; target states are `fc` of three layers; its head reads normed states.

    With several layers (`layers.0` and so on in the checkpoint) those after the first are plain Llama layers.
    """

    merged = _MERGED
    unused: tuple[str, ...] = (r"^embed_tokens\.", r"^t2d$", r"\.inv_freq$")

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch, dtype, size = config.arch, model_dtype(config), config.arch.hidden_size
        self.fc = Linear(
            in_features=len(self.draft.reads) * size,
            out_features=size,
            bias=self.draft.bias,
            dtype=dtype,
            name=f"{prefix}fc",
        )
        self.layers = nn.ModuleList(self._blocks(config, prefix))
        if arch.num_layers == 1:
            self.renamed = {"layers": "", "layers.0": "midlayer"}
        self.norm = block_norm(config, f"{prefix}norm")
        self.d2t = None
        if self.draft.vocab_size:
            self.lm_head = VocabEmbedding(
                vocab_size=self.draft.vocab_size,
                size=size,
                dtype=dtype,
                is_head=True,
                name=f"{prefix}lm_head",
            )
        if self.draft.has_offsets:
            self.d2t = TokenOffsets(self.draft.vocab_size, f"{prefix}d2t")
        else:
            self.unused = (*self.unused, r"^d2t$")

    def read(self, rows: Tensor) -> Tensor:
        read: Tensor = self.fc(rows, _NO_STEP)
        return read

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = embedded, states
        for layer in self.layers:
            x, residual = layer(x, residual, positions, step)
        return torch.add(x, residual)

    def _blocks(self, config: EngineConfig, prefix: str) -> Iterator[Block]:
        """Yield the layers: the first reads embeddings and states, the others states only."""
        later = replace(config, model_arch=replace(config.arch, attention_in_size=None))
        for layer, rotary in enumerate(rotaries_of(config)):
            name = "midlayer" if config.arch.num_layers == 1 else f"layers.{layer}"
            kind, read = (BLOCKS["sequential"], later) if layer else (Eagle3Block, config)
            yield kind(config=read, prefix=f"{prefix}{name}", layer=layer, rotary=rotary)

    def loaded(self) -> None:
        if self.d2t is not None and not self.d2t.is_within(self.config.arch.vocab_size):
            raise UnsupportedModelError(
                f"tensor 'd2t' has token ids outside the target's vocabulary of {self.config.arch.vocab_size}"
            )

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        hidden, num_tokens = self.norm(hidden), self.config.arch.vocab_size
        if self.lm_head is None:
            return super().compute_logits(hidden, adapter_rows, num_added)
        logits = self.lm_head.logits(hidden, adapter_rows, num_added)
        if self.d2t is None and logits.shape[1] >= num_tokens:
            return logits[:, :num_tokens]
        spread = logits.new_full((len(logits), num_tokens), -torch.inf)
        if self.d2t is None:
            spread[:, : logits.shape[1]] = logits
            return spread
        return spread.index_copy_(1, self.d2t.token_ids(), logits)


class TokenOffsets(Layer):
    """Offset from a head's token id to the target's, by token."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(name)
        self.weight = parameter(count, dtype=torch.int64)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield names[0], Slot(self.weight, "zeros", dtypes=(torch.int64, torch.int32))

    def token_ids(self) -> Tensor:
        """Return [D] int64 the target's ids."""
        return torch.arange(len(self.weight), device=self.weight.device) + self.weight

    def is_within(self, num_tokens: int) -> bool:
        """Return whether all ids are in the target's vocabulary."""
        ids = self.token_ids()
        return bool(((ids >= 0) & (ids < num_tokens)).all())
