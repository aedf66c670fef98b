# SPDX-License-Identifier: Apache-2.0
"""Tensors of an adapter's file by module of the model, in PEFT's layout; and storage of adapters in int8.

Invariant: every tensor belongs to one module and matches it, its partners and the limits, before any is read. Errors
name the file, the tensor and the limit.

Tensors may adapt all experts of a layer together (`target_parameters`): E experts with weights [N, K] have A [E * r,
K], expert after expert, and B [N, r * E], rank after rank. Where transformers stores [E, K, N] without declaring it,
PEFT swaps inputs and outputs: A is [E * r, N], B [K, r * E].
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.low_rank import LowRankStacks
from quire.layers.slot import FLOATS
from quire.lora.adapted import TABLES, AdaptedModule, Kind, tensor_error
from quire.lora.peft_config import PeftConfig
from quire.lora.targets import AdapterTarget, ExpertTarget, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

logger = logging.getLogger(__name__)

_LARGEST = 127


def reading_dtype(kept: torch.dtype) -> torch.dtype:
    """Return the dtype in which an adapter is assembled before it is stored in `kept`."""
    return torch.float32 if kept is torch.int8 else kept


def quantize_adapter(stacks: LowRankStacks, kept: torch.dtype) -> LowRankStacks:
    """Return stacks as stored: unchanged, or in int8, rounded to nearest, in half the memory of bfloat16.

    S slots, P parts of N outputs, K inputs, R ranks: a [S, P, K, R] has a scale for each of [S, P, R], as has each
    part of b [S, R, N]. The matmul runs on integers, and both scales are applied in between, where there is one number
    per rank.
    """
    if kept is not torch.int8:
        return stacks
    a, of_a = _integers(stacks.a, 2)
    scales, integers = stacks.scales * of_a.squeeze(2), []
    for part, columns in enumerate(stacks.columns()):
        own, of_b = _integers(stacks.b[:, :, columns], 2)
        scales[:, part] *= of_b.squeeze(2)
        integers.append(own)
    return replace(stacks, a=a, b=torch.cat(integers, 2), scales=scales)


def _integers(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return integers and their scales along a dimension; an empty tensor gives zeros."""
    largest = values.abs().amax(dim, keepdim=True) if values.shape[dim] else values.new_zeros(1)
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    return (values / scales).round().to(torch.int8), scales


_PREFIX = "base_model.model."
_ENDS: Mapping[str, Kind] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_B.bias": "expand_bias",
    ".base_layer.bias": "bias",
    ".bias": "bias",
    ".token_adapter.trainable_tokens_delta": "rows",
    ".token_adapter.base_layer.weight": "base_table",
    ".base_layer.weight": "base_table",
    ".weight": "table",
}  # suffixes of tensor names; the first match counts
_WHOLE = ("bias", "weight", *TABLES)  # kinds that replace a module's own
_OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")  # suffixes used only for tables


def adapted_modules(
    file: SafetensorsFile, config: PeftConfig, targets: Targets, max_rank: int, max_added: int = 0
) -> list[AdaptedModule]:
    """Return all modules of the file; embedding and head may have `max_added` rows of added tokens.

    Raises:
        ModelLoadError: a tensor has no module, no partner, or a wrong shape or dtype.
    """
    modules: dict[str, dict[Kind, TensorInfo]] = {}
    left_out = {info.name for info in file.tensors.values() if _is_left_out(info, targets)}
    if left_out:
        logger.warning(
            "%s: ignored %d tensors, such as %s, for parts of the model that are not served",
            file.path,
            len(left_out),
            min(left_out),
        )
    for info in file.tensors.values():
        if info.name in left_out:
            continue
        name, kind = _module_of(file, info)
        if targets.is_idle(name):
            continue
        own = modules.setdefault(targets.name_of(name), {})
        if kind in own:
            raise tensor_error(file, info, f"duplicates {own[kind].name!r}")
        own[kind] = info
    if not modules:
        suffix = " for a served part of the model" if left_out else ""
        raise ModelLoadError(f"{file.path}: no tensors{suffix}")
    for name, target in targets.modules.items():
        if target.is_of_adapters and not modules.get(name, {}).keys() & {"weight", "table"}:
            raise ModelLoadError(
                f"{file.path}: no tensor {_PREFIX}{name}.weight, and the model has no head of its own"
            )
    found: list[AdaptedModule] = []
    for name, tensors in modules.items():
        experts = find_experts(name, targets)
        if experts is None:
            checked = _Checked(file, config, name, _as_kinds_of(name, tensors, targets), targets, max_added)
            found.append(checked.module(max_rank))
        else:
            found.extend(expert_modules(file, config, name, tensors, experts, max_rank))
    return found


def _is_left_out(info: TensorInfo, targets: Targets) -> bool:
    """Return whether a tensor is for a module that is not served; a target module always is."""
    name = info.name.removeprefix(_PREFIX)
    ends = (end for end in _ENDS if name.endswith(end))
    is_target = any(targets.name_of(name.removesuffix(end)) in targets.modules for end in ends)
    return not is_target and targets.is_left_out(name)


def _as_kinds_of(
    name: str, tensors: Mapping[Kind, TensorInfo], targets: Targets
) -> Mapping[Kind, TensorInfo]:
    """Return a module's tensors; a whole weight is a table's, or that of a layer after the pooler."""
    target = targets.modules.get(name)
    if target is None or not target.is_head or "table" not in tensors:
        return tensors
    return {"weight" if kind == "table" else kind: info for kind, info in tensors.items()}


def _module_of(file: SafetensorsFile, info: TensorInfo) -> tuple[str, Kind]:
    """Return the module and the kind of a tensor."""
    for end, kind in _ENDS.items():
        if info.name.startswith(_PREFIX) and info.name.endswith(end):
            return info.name.removeprefix(_PREFIX).removesuffix(end), kind
    raise tensor_error(file, info, f"is neither {_PREFIX}<module>.lora_A.weight nor another supported name")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Checks of one module's tensors by kind."""

    file: SafetensorsFile
    config: PeftConfig
    name: str
    tensors: Mapping[Kind, TensorInfo]
    targets: Targets
    max_added: int

    def module(self, max_rank: int) -> AdaptedModule:
        """Return the module if all of it matches."""
        target = self._target()
        self._check_partners()
        rank = next(iter(self.tensors["a"].shape), 0) if "a" in self.tensors else 0
        tokens = self.config.trained_tokens(self.name) if "rows" in self.tensors else ()
        shapes = _shapes(target, rank, len(tokens))
        for kind, info in self.tensors.items():
            more = self.max_added if kind in ("table", "base_table") else 0
            self._check_tensor(info, shapes.get(kind, (target.outputs,)), more)
        if rank:
            self._check_rank(rank, max_rank)
        if "rows" in self.tensors:
            self._check_tokens(tokens, target)
        if "weight" in self.tensors:  # applied as a full-rank product in place of the layer's weight
            return AdaptedModule(target, self.tensors, target.outputs, 1.0)
        scale = self.config.scale_of(self.name, rank) if rank else 0.0
        return AdaptedModule(target, self.tensors, rank, scale, tokens)

    def _target(self) -> AdapterTarget:
        target = self.targets.modules.get(self.name)
        if target is None:
            problem = f"is for {self.name}, which adapters cannot change"
            raise tensor_error(self.file, next(iter(self.tensors.values())), problem)
        if "bias" in self.tensors and not self.targets.has_bias(target):
            raise tensor_error(self.file, self.tensors["bias"], "is a bias, but the model's layer has none")
        self._check_kind(target)
        return target

    def _check_kind(self, target: AdapterTarget) -> None:
        """Check that the kinds match: tables have kinds of their own and no known column norms."""
        for kind, info in self.tensors.items():
            if kind not in (*TABLES, "magnitude") and info.name.endswith(_OF_TABLES) != target.is_table:
                what = "an embedding" if target.is_table else "not an embedding"
                raise tensor_error(self.file, info, f"is for {self.name}, which is {what}")
            if kind not in TABLES and target.no_dora and self.config.is_dora:
                raise tensor_error(self.file, info, f"is {target.no_dora}")
            if kind == "expand_bias" and not target.has_biases:
                raise tensor_error(self.file, info, f"is a bias, which {self.name} does not support")
            if kind in TABLES and not target.has_rows:
                problem = f"is a whole weight, but {self.name} is neither embedding nor head"
                raise tensor_error(self.file, info, problem)

    def _check_partners(self) -> None:
        """Check that a product is complete, and has DoRA's magnitude exactly if configured."""
        product = {kind: info for kind, info in self.tensors.items() if kind not in _WHOLE}
        if product and "weight" in self.tensors:
            problem = f"is the whole weight of {self.name}, which also has lora_A and lora_B"
            raise tensor_error(self.file, self.tensors["weight"], problem)
        needs: list[Kind] = ["a", "b", "magnitude"] if self.config.is_dora else ["a", "b"]
        for kind in needs if product else ():
            if kind not in product:
                info = next(iter(product.values()))
                ends = [end for end, other in _ENDS.items() if other == kind]
                end = ends[-1] if info.name.endswith(_OF_TABLES) else ends[0]
                raise tensor_error(self.file, info, f"has no partner {_PREFIX}{self.name}{end}")
        if "magnitude" in product and not self.config.is_dora:
            raise tensor_error(
                self.file, product["magnitude"], f"is for DoRA, but {self.config.where} does not set use_dora"
            )
        if "expand_bias" in product and self.config.is_dora:
            raise tensor_error(self.file, product["expand_bias"], "is a bias, which DoRA does not support")

    def _check_rank(self, rank: int, max_rank: int) -> None:
        said = self.config.rank_of(self.name)
        if rank > max_rank:
            raise tensor_error(
                self.file, self.tensors["a"], f"has rank {rank}; --max-lora-rank is {max_rank}"
            )
        if rank != said:
            raise tensor_error(
                self.file, self.tensors["a"], f"has rank {rank}, {self.config.where} says {said}"
            )

    def _check_tokens(self, tokens: Sequence[int], target: AdapterTarget) -> None:
        known = target.inputs if target.is_table else target.outputs
        outside = [token for token in tokens if token >= known + self.max_added]
        if outside:
            problem = f"is for token {outside[0]} ({self.config.where}), but the model has {known}"
            raise tensor_error(self.file, self.tensors["rows"], problem)

    def _check_tensor(self, info: TensorInfo, shape: tuple[int, ...], more: int) -> None:
        """Check dtype and shape; up to `more` further rows are allowed."""
        if info.dtype not in FLOATS:
            dtype = str(info.dtype).removeprefix("torch.")
            raise tensor_error(self.file, info, f"is {dtype}; adapters are floats")
        has_rows = info.shape[1:] == shape[1:] and shape[0] <= info.shape[0] <= shape[0] + more
        if len(info.shape) != len(shape) or not has_rows or 0 in shape:
            implied = f"the model's layer implies {list(shape)}"
            if more:
                implied += f", plus up to {more} rows"
            raise tensor_error(self.file, info, f"has shape {list(info.shape)}; {implied}")


def _shapes(target: AdapterTarget, rank: int, num_tokens: int) -> dict[Kind, tuple[int, ...]]:
    """Return the shapes of all kinds but those of [outputs]."""
    table, size = (target.outputs, target.inputs)[:: -1 if target.is_table else 1]
    return {
        "a": (rank, target.inputs),
        "b": (target.outputs, rank),
        "weight": (target.outputs, target.inputs),
        "base_table": (table, size),
        "table": (table, size),
        "rows": (num_tokens, size),
    }


_WRAPPED = ".base_layer"  # suffix of a module's name where PEFT adapts several of its parameters


def find_experts(name: str, targets: Targets) -> Mapping[str, ExpertTarget] | None:
    """Return the expert weights, by name, that a module of the file stands for; None if it is none."""
    return targets.find_experts(name.removesuffix(_WRAPPED))


def expert_modules(
    file: SafetensorsFile,
    config: PeftConfig,
    name: str,
    tensors: Mapping[Kind, TensorInfo],
    experts: Mapping[str, ExpertTarget],
    max_rank: int,
) -> Iterator[AdaptedModule]:
    """Yield the part of the file's module of each expert.

    Raises:
        ModelLoadError: a tensor has no partner or does not match any weight of these experts, or the rank is not the
            config's or above the limit.
    """
    a, b = _pair(file, name, tensors)
    parameter, matrices, is_swapped = _ExpertMatch(file, a, b, experts).found()
    count, path = len(matrices.targets), f"{name.removesuffix(_WRAPPED)}.{parameter}"
    rank, said = a.shape[0] // count, config.rank_of(path)
    if rank > max_rank:
        raise tensor_error(
            file, a, f"has rank {rank} for each of {count} experts; --max-lora-rank is {max_rank}"
        )
    if rank != said:
        raise tensor_error(
            file, a, f"has rank {rank} for each of {count} experts, {config.where} says {said}"
        )
    own: dict[Kind, TensorInfo] = {"a": b, "b": a} if is_swapped else {"a": a, "b": b}
    for index, target in enumerate(matrices.targets):
        take = partial(
            _expert_part, index=index, rank=rank, is_swapped=is_swapped, interleaved=matrices.interleaved
        )
        yield AdaptedModule(target, own, rank, config.scale_of(path, rank), take=take)


def _pair(
    file: SafetensorsFile, name: str, tensors: Mapping[Kind, TensorInfo]
) -> tuple[TensorInfo, TensorInfo]:
    for kind, info in tensors.items():
        if kind not in ("a", "b"):
            raise tensor_error(file, info, "is for experts, which support only lora_A and lora_B")
        if info.dtype not in FLOATS:
            raise tensor_error(
                file, info, f"is {str(info.dtype).removeprefix('torch.')}; adapters are floats"
            )
    pairs: tuple[tuple[Kind, Kind], ...] = (("a", "b"), ("b", "a"))
    for kind, other in pairs:
        if kind not in tensors:
            raise tensor_error(
                file, tensors[other], f"has no partner base_model.model.{name}.lora_{kind.upper()}.weight"
            )
    return tensors["a"], tensors["b"]


@dataclass(frozen=True, slots=True)
class _ExpertMatch:
    """Search for the expert weight that matches the shapes of a pair of tensors."""

    file: SafetensorsFile
    a: TensorInfo
    b: TensorInfo
    experts: Mapping[str, ExpertTarget]

    def found(self) -> tuple[str, ExpertTarget, bool]:
        """Return its name, the weights, and whether inputs and outputs are swapped."""
        ways = [
            (parameter, matrices, is_swapped)
            for parameter, matrices in self.experts.items()
            for is_swapped in (matrices.is_transposed, not matrices.is_transposed)
            if self._fits(matrices.targets[0], len(matrices.targets), is_swapped)
        ]
        # Without a gate, the transpose of one weight has the shape of the other.
        as_kept = [way for way in ways if way[2] == way[1].is_transposed]
        if ways:
            return (as_kept or ways)[0]
        sizes = " or ".join(f"[{m.targets[0].outputs}, {m.targets[0].inputs}]" for m in self.experts.values())
        problem = f"has shape {list(self.a.shape)}, its partner {list(self.b.shape)}"
        count = len(next(iter(self.experts.values())).targets)
        raise tensor_error(
            self.file, self.a, f"{problem}; the model has {count} experts with weights {sizes}"
        )

    def _fits(self, target: AdapterTarget, count: int, is_swapped: bool) -> bool:
        inputs, outputs = (target.inputs, target.outputs)[:: -1 if is_swapped else 1]
        ranks = self.a.shape[0]
        return ranks % count == 0 < ranks and (self.a.shape, self.b.shape) == (
            (ranks, inputs),
            (outputs, ranks),
        )


def _expert_part(
    kind: Kind, tensor: Tensor, *, index: int, rank: int, is_swapped: bool, interleaved: bool
) -> Tensor:
    """Return an expert's a [r, K] or b [N, r] from the tensor of all experts."""
    by_expert = (kind == "a") != is_swapped
    own = (
        tensor[index * rank : (index + 1) * rank]
        if by_expert
        else tensor[:, index :: tensor.shape[1] // rank]
    )
    own = own.t() if is_swapped else own
    return torch.cat((own[::2], own[1::2])) if interleaved and kind == "b" else own
