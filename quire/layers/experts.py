"""The experts of a sparse layer: MLPs that are loaded, packed and cut one by one, and computed by one call.

Of several ranks each has some features of every expert or, with `--enable-expert-parallel`, some whole experts.

Shapes: T tokens of the step, H hidden size, or that of latents, I intermediate size of an expert, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.config.arch import ExpertsArch, ExpertStack
from quire.distributed.group import Group
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.experts import ExpertAdapters, ExpertWeights, lay_together, with_scales_alike
from quire.kernels.linear import PackedWeight
from quire.kernels.lora import SharedStacks
from quire.layers.activation import FUNCTIONS, FUSED
from quire.layers.base import Module, activation_dtype, device_type, model_dtype
from quire.layers.expert_exchange import Adapted, Exchange, exchange_of
from quire.layers.expert_lists import GateUpInList, InList, LinearInList
from quire.layers.linear import GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import Member, Shard, members_of
from quire.layers.slot import Slot
from quire.layers.step import StepContext


class InStack(MatrixLayer):
    """Mixed into a layer of an expert whose matrix is one of a stack in the checkpoint."""

    index: int
    count: int
    stack = ExpertStack()
    of_all: frozenset[str] = frozenset()
    """Tensors of the files that are a number for the whole stack."""

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        return [".".join(f"{name}.".rsplit(f".{self.index}.", 1))[:-1] for name in names]

    def stored_name(self, module: str, tensor: str) -> str:
        return module + self.stack.suffix(tensor)

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of this member; a number may stand for all of them."""
        found = super().in_files(module, tensors, files)
        numbers = [name for name, stack in found.items() if not stack.dim()]
        self.of_all |= {self.stored_name(module, name) for name in numbers}
        whole = found.keys() if self.stack.flat else numbers
        return {name: stack if name in whole else stack[0] for name, stack in found.items()}

    def own(self, tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) % self.count:
            return tensor  # no stack, which whoever reads it says
        return tensor.unflatten(0, (self.count, -1))[self.index].flatten(0, 0 if self.stack.flat else 1)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(self.stored_modules(names)):
            stored = self.stored_name(*name.rsplit(".", 1))
            if stored in self.of_all:
                yield stored, replace(slot, shared=True)
                continue
            stacked = slot.of_stack(self.index, self.count)
            yield stored, stacked.merging(0) if self.stack.flat else stacked


class LinearInStack(InStack, Linear):
    """A linear layer whose matrix is one of a stack."""


class _GateUpInStack(InStack, GateUpLinear):
    def stored_modules(self, names: Sequence[str]) -> list[str]:
        stacks = super().stored_modules(names)
        if self.stack.gate_up is None:
            return stacks
        merged = f"{stacks[0].rpartition('.')[0]}.{self.stack.gate_up}"
        return [f"{merged}:{half}" for half in (0, 1)] if self.stack.interleaved else [merged]

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().in_files(module.partition(":")[0], tensors, files)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        if not self.stack.interleaved:
            yield from super().slots(names)
            return
        for name, slot in super().slots(names):
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
        member = Member(index, experts.count) if config.parallel.enable_expert_parallel else None
        hidden = experts.latent_size or arch.hidden_size
        plain, gate_up = _kinds(experts)
        if experts.gated:
            self.gate_up_proj = gate_up(
                hidden_size=hidden,
                intermediate_size=experts.intermediate_size,
                bias=experts.bias,
                dtype=model_dtype(config),
                activation=experts.activation,
                name=f"{prefix}.gate_up_proj",
                transposed="gate_up_proj" in transposed,
                cut="output" if member is None else "whole",
                member=member,
            )
        else:
            self.up_proj = plain(
                in_features=hidden,
                out_features=experts.intermediate_size,
                bias=experts.bias,
                dtype=model_dtype(config),
                name=f"{prefix}.up_proj",
                cut="output" if member is None else "whole",
                transposed="up_proj" in transposed,
                member=member,
            )
        self.down_proj = plain(
            in_features=experts.intermediate_size,
            out_features=hidden,
            bias=experts.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.down_proj",
            cut="input" if member is None else "whole",
            transposed="down_proj" in transposed,
            member=member,
        )
        for layer in (self.up, self.down_proj):
            layer.takes_adapters = layer.makes_products = False  # `Experts` does both
            layer.rounds_inputs = member is None and not config.lora.enable_lora
            layer.expert = index
            if isinstance(layer, InList):
                layer.index = index
            if isinstance(layer, InStack):
                assert stack is not None, "a member of it"
                layer.index, layer.count, layer.stack = index, experts.count, stack

    @property
    def is_here(self) -> bool:
        """Whether this rank has it."""
        return self.up.is_here

    @property
    def rounds_inputs(self) -> bool:
        """Whether a matrix is multiplied by what was rounded as a checkpoint says."""
        return any(layer.rounded_inputs is not None for layer in (self.up, self.down_proj))

    @property
    def up(self) -> Linear:
        """The first matrix."""
        return self.gate_up_proj if "gate_up_proj" in self._modules else self.up_proj


def _kinds(experts: ExpertsArch) -> tuple[type[Linear], type[GateUpLinear]]:
    """Of a plain layer and of gate and up, by where the checkpoint has them."""
    if experts.listed:
        return LinearInList, GateUpInList
    return (Linear, GateUpLinear) if experts.stack is None else (LinearInStack, _GateUpInStack)


class Experts(Module):
    """`Expert`s by their numbers."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, prefix: str) -> None:
        super().__init__()
        self.name = prefix
        for index in range(experts.count):
            name = f"{prefix}.{index}"
            self.add_module(str(index), Expert(config=config, experts=experts, index=index, prefix=name))
        self._have_slots(range(experts.count))
        self._count, self._top_k = experts.count, experts.routing.top_k
        self._hidden_size = experts.latent_size or config.arch.hidden_size
        self._activation = FUSED[experts.activation]
        self._function = None if experts.gated else FUNCTIONS[experts.activation]
        self._device_type, self._dtype = device_type(config), activation_dtype(config)
        self._weights: ExpertWeights | None = None
        self._rounds: bool | None = None
        self._adapters: ExpertAdapters | None = None
        self._are_whole = config.parallel.enable_expert_parallel
        self._adds_up_with: Group | None = None
        self._exchange: Exchange | None = None

    def take_share(self, shard: Shard) -> None:
        if self._are_whole:
            self._exchange = exchange_of(shard, self._count)
            self._have_slots(members_of(shard.experts.rank, shard.experts.size, self._count))
        else:
            self._adds_up_with = shard.group

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, step: StepContext) -> Tensor:
        """x [T, H], as `Router` chose and weighted -> [T, H]."""
        if self._round_inputs():
            return self._one_by_one(x, chosen, weights, step)
        return self._multiplied(x, chosen, weights, step.adapter_rows)

    def _round_inputs(self) -> bool:
        if self._rounds is None:
            self._rounds = any(member.rounds_inputs for member in self._members())
        return self._rounds

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor, step: StepContext) -> Tensor:
        """No kernel rounds what is between two products as a checkpoint says: each layer by itself does."""
        rows = x.new_zeros(*chosen.shape, x.shape[1])
        for index, member in enumerate(self._members()):
            tokens, places = torch.nonzero(chosen == index, as_tuple=True)
            if len(tokens):
                between = member.up(x[tokens], step)
                if self._function is not None:
                    between = ops.activate(between, self._function)
                rows[tokens, places] = member.down_proj(between, step)
        return ops.add_choices(rows, chosen, weights)

    def take_part(self) -> None:
        """See the function of this name."""
        chosen = torch.empty(0, self._top_k, dtype=torch.int32)
        self._multiplied(torch.empty(0, self._hidden_size, dtype=self._dtype), chosen, chosen.float(), None)

    def _multiplied(self, x: Tensor, chosen: Tensor, weights: Tensor, adapter_rows: Tensor | None) -> Tensor:
        adapters = None if adapter_rows is None else self._of_adapters()
        adapted: Adapted = () if adapter_rows is None or adapters is None else (adapter_rows, adapters)
        if self._exchange is not None:
            return self._exchange.experts(x, chosen, weights, self._of(), adapted)
        out = ops.experts(x, chosen, weights, self._of(), *adapted)
        return out if self._adds_up_with is None else ops.all_reduce(out, self._adds_up_with)

    def why_not_captured(self) -> str | None:
        """See `Capturable`."""
        if self._round_inputs():
            return "experts whose inputs are rounded as a checkpoint says are called one by one"
        nothing = torch.empty(0, dtype=self._dtype)
        taken = ops.experts.takes(self._device_type, nothing, nothing, nothing, self._of())
        if not taken:
            return "experts by reference cannot be captured"
        return None if self._exchange is None else self._exchange.why_not_captured()

    def _of(self) -> ExpertWeights:
        if self._weights is None:
            self._weights = self._gathered()
        return self._weights

    def _of_adapters(self) -> ExpertAdapters | None:
        gate_up, down = (slots.all for slots in self._slots)
        if self._adapters is None and gate_up is not None and down is not None:
            self._adapters = ExpertAdapters(gate_up, down)
        return self._adapters

    def _have_slots(self, numbers: range) -> None:
        """Those of the experts that this rank has."""
        self._slots = SharedStacks(numbers), SharedStacks(numbers)
        for member in self._members():
            member.up.shared_adapters, member.down_proj.shared_adapters = self._slots

    def _members(self) -> list[Expert]:
        return [member for member in self.children() if isinstance(member, Expert)]

    def _gathered(self) -> ExpertWeights:
        """Raises ConfigError: the experts are not kept alike."""
        all_members = self._members()
        members = [member for member in all_members if member.is_here]
        gate_up, down = self._matrices(members)
        for matrices in (gate_up, down):
            if any(matrix.scheme != matrices[0].scheme for matrix in matrices):
                raise ConfigError(f"{self.name}: all experts must be quantised in the same way, or none")
        ups, downs = [member.up for member in members], [member.down_proj for member in members]
        for layers in (ups, downs):
            _unify_scales(layers)
            if gate_up[0].layout == "rows":
                _lay_together(layers)
        gate_up, down = self._matrices(members)
        return ExpertWeights(
            gate_up,
            down,
            _biases(ups),
            _biases(downs),
            self._activation,
            all_members.index(members[0]),
            self._count,
        )

    @staticmethod
    def _matrices(members: Sequence[Expert]) -> tuple[tuple[PackedWeight, ...], tuple[PackedWeight, ...]]:
        return (
            tuple(member.up.matrix() for member in members),
            tuple(member.down_proj.matrix() for member in members),
        )


def take_part(model: nn.Module) -> None:
    """Compute for tokens of other replicas, layer by layer, in a step in which this one has none."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.take_part()


EXPERTS: frozenset[type[nn.Module]] = frozenset(
    {Experts, Expert, LinearInStack, _GateUpInStack, LinearInList, GateUpInList}
)
"""Modules of which experts are made."""


def _unify_scales(layers: Sequence[Linear]) -> None:
    """Give the matrices of these scales of one type."""
    packed = [layer.packed for layer in layers if layer.packed is not None]
    if len(packed) == len(layers):
        for layer, alike in zip(layers, with_scales_alike(packed), strict=True):
            layer.packed = alike


def _lay_together(layers: Sequence[Linear]) -> None:
    """Have what these hold lie in one memory, where a GPU's kernels find that of an expert by its number."""
    for parts in zip(*(layer.tensors().values() for layer in layers), strict=True):
        lay_together(parts)


def _biases(layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    return tuple(layer.bias.data.float() for layer in layers if layer.bias is not None)
