# SPDX-License-Identifier: Apache-2.0
"""PEFT tensors that adapt all experts of a layer together (`target_parameters`).

Shapes: E experts with weights [N, K]; A [E * r, K], expert after expert, and B [N, r * E], rank after rank. Where
transformers stores [E, K, N] without declaring it, PEFT swaps inputs and outputs: A is [E * r, N], B [K, r * E].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.layers.slot import FLOATS
from quire.lora.adapted import AdaptedModule, Kind, tensor_error
from quire.lora.peft_config import PeftConfig
from quire.lora.targets import AdapterTarget, ExpertTarget, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

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
