"""The experts of a sparse layer: MLPs that are loaded, packed and cut one by one, and computed by one call.

Shapes: T tokens of the step, H hidden size, I intermediate size of an expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.experts import ExpertWeights
from quire.layers.base import Module, model_dtype
from quire.layers.linear import GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.slot import Slot


class _InStack(MatrixLayer):
    """Mixed into a layer of an expert whose matrix is one of a stack, [E, N, K], in the checkpoint."""

    index: int
    count: int

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(names):
            yield ".".join(name.rsplit(f".{self.index}.", 1)), slot.of_stack(self.index, self.count)


class _GateUpInStack(_InStack, GateUpLinear):
    pass


class _LinearInStack(_InStack, Linear):
    pass


class Expert(Module):
    """The two matrices of one expert, [2 I, H] and [H, I]; `Experts` multiplies by them."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, index: int, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        stacked = experts.stacked
        self.gate_up_proj = (_GateUpInStack if stacked else GateUpLinear)(
            hidden_size=arch.hidden_size,
            intermediate_size=experts.intermediate_size,
            bias=False,
            dtype=model_dtype(config),
            activation="silu",
            name=f"{prefix}.gate_up_proj",
        )
        self.down_proj = (_LinearInStack if stacked else Linear)(
            in_features=experts.intermediate_size,
            out_features=arch.hidden_size,
            bias=False,
            dtype=model_dtype(config),
            name=f"{prefix}.down_proj",
            cut="input",
        )
        for layer in (self.gate_up_proj, self.down_proj):
            if isinstance(layer, _InStack):
                layer.index, layer.count = index, experts.count


class Experts(Module):
    """`Expert`s by their numbers."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, prefix: str) -> None:
        super().__init__()
        self.name = prefix
        for index in range(experts.count):
            name = f"{prefix}.{index}"
            self.add_module(str(index), Expert(config=config, experts=experts, index=index, prefix=name))
        self._weights: ExpertWeights | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], as `Router` chose and weighted -> [T, H]."""
        return ops.experts(x, chosen, weights, self._of())

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        return None if self._of().layout == "panels" else "experts by reference cannot be captured"

    def _of(self) -> ExpertWeights:
        if self._weights is None:
            self._weights = self._gathered()
        return self._weights

    def _gathered(self) -> ExpertWeights:
        """Raises ConfigError: the experts are not kept alike."""
        members = [member for member in self.children() if isinstance(member, Expert)]
        gate_up = tuple(member.gate_up_proj.matrix() for member in members)
        down = tuple(member.down_proj.matrix() for member in members)
        for matrices in (gate_up, down):
            if any(matrix.scheme != matrices[0].scheme for matrix in matrices):
                raise ConfigError(f"{self.name}: all experts must be quantised in the same way, or none")
        return ExpertWeights(gate_up, down)
