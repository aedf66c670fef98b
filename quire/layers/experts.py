# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts (N. Shazeer et al., 2017, arXiv:1701.06538): router, experts and the sparse feed-forward block.

Experts are loaded, packed and sharded one by one, and computed in one call. Each rank has some features of every expert
or, with `--enable-expert-parallel`, some whole experts. A checkpoint may store experts as modules, in a stack
(`InStack`) or in lists (`InList`): `experts.gate_up_projs.3`, `experts.down_projs.3`, as Unsloth splits stacks for
bitsandbytes, which quantizes linear layers only.

Shapes: T tokens of the step, H hidden size, or that of latents, I intermediate size of an expert, E experts, k experts
of a token.
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
from quire.kernels.experts import ExpertAdapters, ExpertWeights, make_contiguous, with_scales_alike
from quire.kernels.linear import PackedWeight
from quire.kernels.low_rank import SharedStacks
from quire.layers.activation import FUNCTIONS, FUSED
from quire.layers.base import Module, RowSource, activation_dtype, device_type, model_dtype, parameter
from quire.layers.expert_exchange import Adapted, ExpertExchange, exchange_of
from quire.layers.linear import ExactLinear, GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.quantized.codec import Alternate, Codec
from quire.layers.shard import Shard, StackMember, members_of
from quire.layers.slot import Slot
from quire.layers.step import StepContext
from quire.layers.vectors import OutBias


class InList(MatrixLayer):
    """Mixin for an expert layer whose weight is a module of a list; `index` is the expert's number."""

    index: int

    def listed(self, name: str) -> str:
        """Return the list's name in the files for the module's name with one module per expert."""
        experts, _, leaf = name.rpartition(f".{self.index}.")
        return f"{experts}.{leaf}s.{self.index}"


class LinearInList(InList, Linear):
    """Linear layer that is stored in a list."""

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        return [self.listed(name) for name in names]

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        return super().slots(self.stored_modules(names))


class GateUpInList(InList, GateUpLinear):
    """Merged gate and up projection that is one module of a list, with alternating outputs.

    Each half counts as a module and is named by its index: `gate_up_projs.3:0`.
    """

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        path, _, _ = names[0].rpartition(".")
        return [f"{self.listed(f'{path}.gate_up_proj')}:{half}" for half in (0, 1)]

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().in_files(module.partition(":")[0], tensors, files)

    def codec_of(self, module: str, codec: Codec) -> Codec:
        return codec if codec.cuts else Alternate(codec, half=int(module[-1]))

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots(self.stored_modules(names)):
            path, _, rest = name.partition(":")
            half, tensor = int(rest[0]), rest[1:]
            yield path + tensor, slot if slot.shared else slot.of_stack(half, 2, dim=1).merging(0)


class ExpertRouter(ExactLinear):
    """Score per expert, weight [E, H], and top-k routing."""

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


class InStack(MatrixLayer):
    """Mixin for an expert layer whose weight is one of a stack in the checkpoint."""

    index: int
    count: int
    stack = ExpertStack()
    of_all: frozenset[str] = frozenset()
    """Stored tensors with a single number for the whole stack."""

    def stored_modules(self, names: Sequence[str]) -> list[str]:
        return [".".join(f"{name}.".rsplit(f".{self.index}.", 1))[:-1] for name in names]

    def stored_name(self, module: str, tensor: str) -> str:
        return module + self.stack.suffix(tensor)

    def in_files(self, module: str, tensors: Iterable[str], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this member; a single number may belong to all of them."""
        found = super().in_files(module, tensors, files)
        numbers = [name for name, stack in found.items() if not stack.dim()]
        self.of_all |= {self.stored_name(module, name) for name in numbers}
        whole = found.keys() if self.stack.flat else numbers
        return {name: stack if name in whole else stack[0] for name, stack in found.items()}

    def own(self, tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) % self.count:
            return tensor  # not a stack, which the codec reports
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
    """Linear layer whose weight is one of a stack."""


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
    """Weights of one expert, [2 I, H], or without a gate [I, H], and [H, I]; `Experts` multiplies with them."""

    gate_up_proj: GateUpLinear
    up_proj: Linear

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, index: int, prefix: str) -> None:
        super().__init__()
        arch = config.arch
        stack = experts.stack
        transposed = () if stack is None else stack.transposed
        member = StackMember(index, experts.count) if config.parallel.enable_expert_parallel else None
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
                partition="output" if member is None else "whole",
                member=member,
            )
        else:
            self.up_proj = plain(
                in_features=hidden,
                out_features=experts.intermediate_size,
                bias=experts.bias,
                dtype=model_dtype(config),
                name=f"{prefix}.up_proj",
                partition="output" if member is None else "whole",
                transposed="up_proj" in transposed,
                member=member,
            )
        self.down_proj = plain(
            in_features=experts.intermediate_size,
            out_features=hidden,
            bias=experts.bias,
            dtype=model_dtype(config),
            name=f"{prefix}.down_proj",
            partition="input" if member is None else "whole",
            transposed="down_proj" in transposed,
            member=member,
        )
        for layer in (self.up, self.down_proj):
            layer.takes_adapters = layer.makes_products = False  # `Experts` does both
            layer.quantizes_inputs = member is None and not config.serves_adapters
            layer.expert = index
            if isinstance(layer, InList):
                layer.index = index
            if isinstance(layer, InStack):
                assert stack is not None, "a member of it"
                layer.index, layer.count, layer.stack = index, experts.count, stack

    @property
    def is_here(self) -> bool:
        """True if this rank holds it."""
        return self.up.is_here

    @property
    def quantizes_inputs(self) -> bool:
        """True if the checkpoint specifies activation quantization for one of its layers."""
        return any(layer.input_quantization is not None for layer in (self.up, self.down_proj))

    @property
    def up(self) -> Linear:
        """First projection: gate and up, or up."""
        return self.gate_up_proj if "gate_up_proj" in self._modules else self.up_proj


def _kinds(experts: ExpertsArch) -> tuple[type[Linear], type[GateUpLinear]]:
    """Return the classes of a plain layer and of gate and up, by how the checkpoint stores them."""
    if experts.listed:
        return LinearInList, GateUpInList
    return (Linear, GateUpLinear) if experts.stack is None else (LinearInStack, _GateUpInStack)


class Experts(Module):
    """All experts of a layer, by number, computed in one fused call."""

    def __init__(self, *, config: EngineConfig, experts: ExpertsArch, prefix: str) -> None:
        super().__init__()
        self.name = prefix
        for index in range(experts.count):
            name = f"{prefix}.{index}"
            self.add_module(str(index), Expert(config=config, experts=experts, index=index, prefix=name))
        self._have_slots(range(experts.count))
        self._count, self._top_k = experts.count, experts.routing.top_k
        self._hidden_size = experts.latent_size or config.arch.hidden_size
        self._activation = FUSED.get(experts.activation)
        if self._activation is None and (config.parallel.enable_expert_parallel or config.serves_adapters):
            raise ConfigError(
                f"no kernel computes experts with the activation {experts.activation!r}; start without "
                "--enable-expert-parallel and --enable-lora"
            )
        self._function = None if experts.gated else FUNCTIONS[experts.activation]
        self._device_type, self._dtype = device_type(config), activation_dtype(config)
        self._weights: ExpertWeights | None = None
        self._one_by_one_only: bool | None = None
        self._adapters: ExpertAdapters | None = None
        self._are_whole = config.parallel.enable_expert_parallel
        self._adds_up_with: Group | None = None
        self._exchange: ExpertExchange | None = None

    def apply_shard(self, shard: Shard) -> None:
        if self._are_whole:
            self._exchange = exchange_of(shard, self._count)
            self._have_slots(members_of(shard.experts.rank, shard.experts.size, self._count))
        else:
            self._adds_up_with = shard.group

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, step: StepContext) -> Tensor:
        """x [T, H], chosen and weights from `ExpertRouter` -> [T, H]."""
        if self._goes_one_by_one():
            return self._one_by_one(x, chosen, weights, step)
        return self._multiplied(x, chosen, weights, step.adapter_rows)

    def _goes_one_by_one(self) -> bool:
        if self._one_by_one_only is None:
            self._one_by_one_only = self._activation is None or any(
                member.quantizes_inputs for member in self._members()
            )
        return self._one_by_one_only

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor, step: StepContext) -> Tensor:
        """Compute expert by expert: no kernel has the activation, or quantizes between two matmuls as a checkpoint
        specifies.
        """
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
        """See the module function."""
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
        if self._goes_one_by_one():
            return "experts that no kernel can fuse are called one by one"
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
        """Set the adapter slots of the experts that this rank has."""
        self._slots = SharedStacks(numbers), SharedStacks(numbers)
        for member in self._members():
            member.up.shared_adapters, member.down_proj.shared_adapters = self._slots

    def _members(self) -> list[Expert]:
        return [member for member in self.children() if isinstance(member, Expert)]

    def _gathered(self) -> ExpertWeights:
        """Gather the experts' weights for the fused call.

        Raises:
            ConfigError: the experts are stored in different formats.
        """
        all_members = self._members()
        members = [member for member in all_members if member.is_here]
        gate_up, down = self._matrices(members)
        for matrices in (gate_up, down):
            if any(matrix.scheme != matrices[0].scheme for matrix in matrices):
                raise ConfigError(f"{self.name}: all experts must be quantized in the same way, or none")
        ups, downs = [member.up for member in members], [member.down_proj for member in members]
        for layers in (ups, downs):
            _unify_scales(layers)
            if gate_up[0].layout == "rows":
                _lay_together(layers)
        gate_up, down = self._matrices(members)
        assert self._activation is not None, "else experts are called one by one"
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
"""Module classes that make up experts."""


def _unify_scales(layers: Sequence[Linear]) -> None:
    """Give the weights of these layers scales of one type."""
    packed = [layer.packed for layer in layers if layer.packed is not None]
    if len(packed) == len(layers):
        for layer, alike in zip(layers, with_scales_alike(packed), strict=True):
            layer.packed = alike


def _lay_together(layers: Sequence[Linear]) -> None:
    """Move the layers' tensors into contiguous memory, where GPU kernels index an expert by number."""
    for parts in zip(*(layer.tensors().values() for layer in layers), strict=True):
        make_contiguous(parts)


def _biases(layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    return tuple(layer.bias.data.float() for layer in layers if layer.bias is not None)


class SparseMLP(Module):
    """Weighted sum of a token's experts, plus the shared expert if there is one."""

    def __init__(self, *, config: EngineConfig, prefix: str) -> None:
        super().__init__()
        experts = config.arch.experts
        assert experts is not None, "a sparse layer has experts"
        self.gate = ExpertRouter(config=config, experts=experts, name=f"{prefix}.gate")
        shared_kind: type[GatedMLP | PlainMLP] = GatedMLP if experts.gated else PlainMLP
        self.experts = Experts(config=config, experts=experts, prefix=f"{prefix}.experts")
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if experts.latent_size:
            hidden, latent = config.arch.hidden_size, experts.latent_size
            self.fc1_latent_proj = _latent_proj(config, hidden, latent, f"{prefix}.fc1_latent_proj")
            self.fc2_latent_proj = _latent_proj(config, latent, hidden, f"{prefix}.fc2_latent_proj")
        self.weighs_input = experts.weighs_input
        self.out_bias = OutBias(config=config, name=f"{prefix}.out_bias") if experts.out_bias else None
        self.shared_expert: GatedMLP | PlainMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if experts.shared_size:
            self.shared_expert = shared_kind(
                config=config, prefix=f"{prefix}.shared_expert", intermediate_size=experts.shared_size
            )
        if experts.shared_gate:
            self.shared_expert_gate = Linear(
                in_features=config.arch.hidden_size,
                out_features=1,
                bias=False,
                dtype=model_dtype(config),
                name=f"{prefix}.shared_expert_gate",
                activation="sigmoid",
            )

    def reads(self, source: RowSource) -> None:
        """Ignore the declaration: x has several readers here, so it cannot arrive quantized."""

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        out = self._routed(x, step)
        if self.out_bias is not None:
            out = self.out_bias(out)
        return out if self.shared_expert is None else out + self._shared(x, step)

    def _routed(self, x: Tensor, step: StepContext) -> Tensor:
        chosen, weights = self.gate.choose(x, step)
        if self.weighs_input:
            x, weights = x * weights.to(x.dtype), weights.clamp(1.0, 1.0)
        if self.fc1_latent_proj is not None:
            x = self.fc1_latent_proj(x, step)
        out: Tensor = self.experts(x, chosen, weights, step)
        return out if self.fc2_latent_proj is None else self.fc2_latent_proj(out, step)

    def _shared(self, x: Tensor, step: StepContext) -> Tensor:
        assert self.shared_expert is not None
        out: Tensor = self.shared_expert(x, step)
        if self.shared_expert_gate is None:
            return out
        return out * self.shared_expert_gate(x, step)


def _latent_proj(config: EngineConfig, inputs: int, outputs: int, name: str) -> Linear:
    """Return a projection between hidden states and the experts' latents (Nemotron 3 Super, NVIDIA, 2025)."""
    return Linear(
        in_features=inputs,
        out_features=outputs,
        bias=config.arch.mlp_bias,
        dtype=model_dtype(config),
        name=name,
    )
