"""Medusa's heads (Cai et al., 2024, arXiv:2401.10774): each guesses one token, the first that after the next.

Shapes: N rows, H hidden size, V vocabulary rows.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.base import Layer, Module, model_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.step import StepContext
from quire.models.base import CausalLM

_NO_STEP = StepContext(groups=())
"""Heads keep nothing of a request."""


class ResidualBlocks(Module):
    """`x + silu(linear(x))`, one after the other."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        arch, draft = config.arch, config.arch.draft
        assert draft is not None, "heads guess for somebody"
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
    """All heads; they read what the target's last norm gives."""

    base_prefix = ""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        arch, draft = config.arch, config.arch.draft
        assert draft is not None, "heads guess for somebody"
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
        """What a head says by hidden states [N, H]: float32 [N, V]."""
        table = self.lm_heads[head]
        assert isinstance(table, VocabEmbedding)
        return table.logits(self.blocks[head](hidden))

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """The authors number what a head is made of: blocks, whose matrix is called linear, and then the table."""
        for names, layer in super().checkpoint_layers():
            yield [self._numbered(name) for name in names] if self.is_numbered else names, layer

    def _numbered(self, name: str) -> str:
        kind, head, *rest = name.split(".")
        return f"{head}.{rest[-1]}.linear" if kind == "blocks" else f"{head}.{self.config.arch.num_layers}"
