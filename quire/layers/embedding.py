"""Token embedding, which may also be the output head, and learned position embedding.

Shapes: T tokens, N tokens whose logits are wanted, V vocabulary rows, H hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels import ops
from quire.layers.base import Layer, Slot, model_dtype, parameter


class VocabEmbedding(Layer):
    """A row per token: looked up on the way in, or multiplied with on the way out; a tied model uses one for both.

    `scale` multiplies looked-up rows, rounded to the model's dtype first as Gemma does it.
    """

    def __init__(self, *, vocab_size: int, size: int, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, size, dtype=dtype)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] in [0, V) -> [T, H]."""
        rows = ops.embedding(ids, self.weight)
        return rows if self.scale is None else rows * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return ops.linear(hidden, self.weight, None).float()

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")


class PositionEmbedding(Layer):
    """A learned row per position; `offset` rows stand unused at the start of the table (2 in OPT).

    Raises:
        ConfigError: the context is to be longer than the table.
    """

    def __init__(self, *, config: EngineConfig, offset: int = 0) -> None:
        super().__init__()
        num_positions = config.arch.max_position_embeddings
        if config.model.max_model_len > num_positions:
            raise ConfigError(
                f"--max-model-len is {config.model.max_model_len}, but the model has learned {num_positions} positions"
            )
        self.weight = parameter(num_positions + offset, config.arch.hidden_size, dtype=model_dtype(config))
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, H]."""
        return ops.embedding(positions + self.offset, self.weight)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield f"{names[0]}.weight", Slot(self.weight, "normal")
