"""EAGLE's heads: a decoder layer, or a few, that go on in hidden states, whose guesses are a chain.

EAGLE (Li et al., 2024, arXiv:2401.15077) reads what the target's last norm gives; EAGLE-3 (Li et al., 2025,
arXiv:2503.01840) what comes into three of its layers, and has an output head of its own, perhaps of fewer tokens.

Shapes: T tokens of the step, N rows, H hidden size, D tokens of the head, V of the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import CheckpointNames
from quire.errors import UnsupportedModelError
from quire.layers.base import Layer, model_dtype, parameter
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm, RMSNorm, block_norm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.models.blocks import BLOCKS, Block
from quire.models.decoder import rotaries_of
from quire.models.draft_heads.autoregressive import AutoregressiveHead

_MERGED = CheckpointNames().merged
_NO_STEP = StepContext(groups=())
"""What is read of the target becomes a state before the head's own step begins."""


class EagleBlock(Block):
    """A Llama's layer that norms nothing before attention."""

    norms = ("post_attention_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        attended = self.mixer(x, positions, step)
        x, residual = self.post_attention_layernorm.add(attended, x)
        return self.mlp(x, step), residual


class Eagle3Block(Block):
    """A Llama's layer whose attention reads embeddings beside states, each normed by itself."""

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
        """x are embeddings, and `residual` states, [T, H]."""
        assert residual is not None, "there are states before it"
        normed = self.hidden_norm(residual)
        attended = self.mixer(torch.cat((self.input_layernorm(x), normed), dim=-1), positions, step)
        x, residual = self.post_attention_layernorm.add(attended, normed if self.adds_normed else residual)
        return self.mlp(x, step), residual


class EagleHead(AutoregressiveHead):
    """`layers(fc([embedding, state]))`; the sum behind the layers is a state, which is not normed.

    Layers behind the first are a Llama's as they are.
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
        assert residual is not None, "there is a layer"
        return torch.add(x, residual)


class Eagle3Head(AutoregressiveHead):
    """`midlayer(embedding, state)`, where the target's states are `fc` of three; its head reads normed states.

    Where there are several layers (`layers.0` and so on in the checkpoint, as servers have them), those behind the
    first are a Llama's as they are.
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
        return self.fc(rows, _NO_STEP)

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        x, residual = embedded, states
        for layer in self.layers:
            x, residual = layer(x, residual, positions, step)
        return torch.add(x, residual)

    def _blocks(self, config: EngineConfig, prefix: str) -> Iterator[Block]:
        """The first reads states beside embeddings, and those behind it states alone."""
        later = replace(config, model_arch=replace(config.arch, attention_in_size=None))
        for layer, rotary in enumerate(rotaries_of(config)):
            name = "midlayer" if config.arch.num_layers == 1 else f"layers.{layer}"
            kind, read = (BLOCKS["sequential"], later) if layer else (Eagle3Block, config)
            yield kind(config=read, prefix=f"{prefix}{name}", layer=layer, rotary=rotary)

    def loaded(self) -> None:
        if self.d2t is not None and not self.d2t.is_within(self.config.arch.vocab_size):
            raise UnsupportedModelError(
                f"tensor 'd2t' names tokens that are not among the {self.config.arch.vocab_size} of the target"
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
    """For each token of a head, how much greater its id is among the target's."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(name)
        self.weight = parameter(count, dtype=torch.int64)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield names[0], Slot(self.weight, "zeros", dtypes=(torch.int64, torch.int32))

    def token_ids(self) -> Tensor:
        """[D] int64 the target's ids."""
        return torch.arange(len(self.weight), device=self.weight.device) + self.weight

    def is_within(self, num_tokens: int) -> bool:
        """Return whether all ids are of the target's tokens."""
        ids = self.token_ids()
        return bool(((ids >= 0) & (ids < num_tokens)).all())
