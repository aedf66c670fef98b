"""What heads have in common that go on by their own states: a layer that reads a token's embedding and the hidden state
before it, and gives the one behind it, of which the target's output head, or one of its own, makes logits.

Its keys and values are in the KV cache, those of token i + 1 at position i, where the state is that it met.

Shapes: T tokens of the step, N rows, H hidden size, W size of what is read of the target.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import DraftArch
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.decoder import DecoderForCausalLM

STATES = "states"
"""Of `StepContext.intermediate`: [T, H] the hidden state before each token."""


class AutoregressiveHead(CausalLM):
    """Base of such heads, which share the target's embedding; their modules are named as in the checkpoint."""

    base_prefix = ""

    def __init__(self, *, config: EngineConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.lm_head = None
        self._target: tuple[DecoderForCausalLM, ...] = ()

    @property
    def draft(self) -> DraftArch:
        """What it is."""
        assert self.config.arch.draft is not None, "heads guess for somebody"
        return self.config.arch.draft

    @property
    def target(self) -> DecoderForCausalLM:
        """The model that is guessed for."""
        return self._target[0]

    def share(self, target: CausalLM) -> None:
        """Have the target's embedding and output head; called once, when both are loaded."""
        assert isinstance(target, DecoderForCausalLM), "what fits was asked at start"
        self._target = (target,)  # in a tuple it is no part of this module

    def read(self, rows: Tensor) -> Tensor:
        """What the target gives for each token, [N, W], as states [N, H]."""
        return rows

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """Ids [T] of tokens, and in `step.intermediate` the states before them -> the states behind them [T, H]."""
        assert step.intermediate is not None, "heads go on from states"
        embedded = self.target.model.embed_tokens(inputs)
        return self.behind(embedded, step.intermediate[STATES], positions, step)

    def behind(self, embedded: Tensor, states: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """The states behind tokens, by their embeddings and the states before them, all [T, H]."""
        raise NotImplementedError

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return self.target.compute_logits(hidden, adapter_rows, num_added)
