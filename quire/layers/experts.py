"""The experts of a sparse layer: MLPs that are loaded, packed and cut one by one, and computed by one call.

Shapes: T tokens of the step, H hidden size, or that of latents, I intermediate size of an expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch, ExpertStack
from quire.distributed.group import Group
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.experts import ExpertWeights, lay_together
from quire.kernels.linear import PackedWeight
from quire.layers.activation import FUSED
from quire.layers.base import Module, activation_dtype, device_type, model_dtype
from quire.layers.linear import GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import Shard
from quire.layers.slot import Slot


class _InStack(MatrixLayer):
    """Mixed into a layer of an expert whose matrix is one of a stack in the checkpoint."""

    index: int
    count: int
    stack = ExpertStack()

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        suffixes = {"weight": self.stack.weight, "bias": self.stack.bias}
        for name, slot in super().slots(names):
            path, leaf = ".".join(name.rsplit(f".{self.index}.", 1)).rsplit(".", 1)
            stacked = slot.of_stack(self.index, self.count)
            yield path + suffixes.get(leaf, f"_{leaf}"), stacked.merging(0) if self.stack.flat else stacked


class LinearInStack(_InStack, Linear):
    """A linear layer whose matrix is one of a stack."""


class _GateUpInStack(_InStack, GateUpLinear):
    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        if self.stack.gate_up is not None:
            names = [f"{names[0].rpartition('.')[0]}.{self.stack.gate_up}"]
        if not self.stack.interleaved:
            yield from super().slots(names)
            return
        for name, slot in super().slots([f"{names[0]}:{half}" for half in range(len(self.spans))]):
            path, _, rest = name.partition(":")
            half, suffix = int(rest[0]), rest[1:]
            outputs = 2 if self.transposed and slot.source.shape[2:] else 1
            yield path + suffix, slot.of_stack(half, len(self.spans), outputs + 1).merging(outputs)


class Expert(Module):
    """The two matrices of one expert, [2 I, H], or without a gate [I, H], and [H, I]; `Experts` multiplies by them."""

    gate_up_proj: GateUpLinear
    up_proj: Linear

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, index: int, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        stack = experts.stack
        transposed = () if stack is None else stack.transposed
        hidden = experts.latent_size or arch.hidden_size
        plain = Linear if stack is None else LinearInStack
        if experts.gated:
            self.gate_up_proj = (GateUpLinear if stack is None else _GateUpInStack)(
                hidden_size=hidden,
                intermediate_size=experts.intermediate_size,
                bias=experts.bias,
                dtype=model_dtype(config),
                activation=experts.activation,
                name=f"{prefix}.gate_up_proj",
                transposed="gate_up_proj" in transposed,
            )
        else:
            self.up_proj = plain(
                in_features=hidden,
                out_features=experts.intermediate_size,
                bias=experts.bias,
                dtype=model_dtype(config),
                name=f"{prefix}.up_proj",
                cut="output",
                transposed="up_proj" in transposed,
            )
        self.down_proj = plain(
            in_features=experts.intermediate_size,
            out_features=hidden,
            bias=experts.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.down_proj",
            cut="input",
            transposed="down_proj" in transposed,
        )
        for layer in (self.up, self.down_proj):
            layer.takes_adapters = False
            if isinstance(layer, _InStack):
                assert stack is not None, "a member of it"
                layer.index, layer.count, layer.stack = index, experts.count, stack

    @property
    def up(self) -> Linear:
        """The first matrix."""
        return self.gate_up_proj if "gate_up_proj" in self._modules else self.up_proj


class Experts(Module):
    """`Expert`s by their numbers."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, prefix: str) -> None:
        super().__init__()
        self.name = prefix
        for index in range(experts.count):
            name = f"{prefix}.{index}"
            self.add_module(str(index), Expert(config=config, experts=experts, index=index, prefix=name))
        self._activation = FUSED[experts.activation]
        self._device_type, self._dtype = device_type(config), activation_dtype(config)
        self._weights: ExpertWeights | None = None
        self._adds_up_with: Group | None = None

    def take_share(self, shard: Shard) -> None:
        """Each rank has some features of every expert."""
        self._adds_up_with = shard.group

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], as `Router` chose and weighted -> [T, H]."""
        out = ops.experts(x, chosen, weights, self._of())
        return out if self._adds_up_with is None else ops.all_reduce(out, self._adds_up_with)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        nothing = torch.empty(0, dtype=self._dtype)
        taken = ops.experts.takes(self._device_type, nothing, nothing, nothing, self._of())
        return None if taken else "experts by reference cannot be captured"

    def _of(self) -> ExpertWeights:
        if self._weights is None:
            self._weights = self._gathered()
        return self._weights

    def _gathered(self) -> ExpertWeights:
        """Raises ConfigError: the experts are not kept alike."""
        members = [member for member in self.children() if isinstance(member, Expert)]
        gate_up, down = self._matrices(members)
        for matrices in (gate_up, down):
            if any(matrix.scheme != matrices[0].scheme for matrix in matrices):
                raise ConfigError(f"{self.name}: all experts must be quantised in the same way, or none")
        if gate_up[0].layout == "rows":
            _lay_together([member.up for member in members])
            _lay_together([member.down_proj for member in members])
            gate_up, down = self._matrices(members)
        return ExpertWeights(
            gate_up,
            down,
            _biases([member.up for member in members]),
            _biases([member.down_proj for member in members]),
            self._activation,
        )

    @staticmethod
    def _matrices(members: Sequence[Expert]) -> tuple[tuple[PackedWeight, ...], tuple[PackedWeight, ...]]:
        return (
            tuple(member.up.matrix() for member in members),
            tuple(member.down_proj.matrix() for member in members),
        )


EXPERTS: frozenset[type[nn.Module]] = frozenset({Experts, Expert, LinearInStack, _GateUpInStack})
"""Modules of which experts are made."""


def _lay_together(layers: Sequence[Linear]) -> None:
    """Have what these hold lie in one memory, where a GPU's kernels find that of an expert by its number."""
    for parts in zip(*(layer.tensors().values() for layer in layers), strict=True):
        lay_together(parts)


def _biases(layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    return tuple(layer.bias.data.float() for layer in layers if layer.bias is not None)
