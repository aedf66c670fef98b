"""What chooses the experts of a token.

Shapes: T tokens of the step, H hidden size, E experts, k experts of a token.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch
from quire.kernels import ops
from quire.layers.base import model_dtype, parameter
from quire.layers.linear import ExactLinear
from quire.layers.slot import Slot
from quire.layers.step import StepContext


class Router(ExactLinear):
    """A score for each expert, weight [E, H], and the choice among them."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, name: str) -> None:
        super().__init__(
            in_features=config.arch.hidden_size,
            out_features=experts.count,
            bias=experts.router_bias,
            dtype=model_dtype(config),
            name=name,
        )
        self.routing = experts.routing
        self._leaf = config.arch.names.renamed.get("gate", "gate")
        self._correction, self._correction_is_row = experts.correction_bias, experts.correction_is_row
        corrected = self._correction is not None
        self.correction_bias = parameter(experts.count, dtype=torch.float32) if corrected else None

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        yield from super().slots(names)
        if self.correction_bias is not None:
            around = names[0].removesuffix(f".{self._leaf}")
            bias = self.correction_bias.unsqueeze(0) if self._correction_is_row else self.correction_bias
            yield f"{around}.{self._correction}", Slot(bias, "zeros")

    def choose(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each token, int32 [T, k], and their weights, float32 [T, k]."""
        return ops.route(self(x, step), self.correction_bias, self.routing)
