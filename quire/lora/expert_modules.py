"""What an adapter's file has for all experts of a layer together, as PEFT writes it (`target_parameters`).

Shapes: E experts; of the matrix [N, K] of each, A [E * r, K], expert after expert, and B [N, r * E], rank after rank.
Where transformers keeps [E, K, N] and does not say so, PEFT takes inputs for outputs: A is [E * r, N], B [K, r * E].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.layers.slot import FLOATS
from quire.lora.adapted import AdaptedModule, Kind, wrong
from quire.lora.peft_config import PeftConfig
from quire.lora.targets import ExpertMatrices, Target, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

_WRAPPED = ".base_layer"
"""Behind a module's name, where PEFT adapts more than one parameter of it, one around the other."""


def experts_of(name: str, targets: Targets) -> Mapping[str, ExpertMatrices] | None:
    """The matrices, by their names, of the experts that a module of the file is; None if it is no experts."""
    return targets.experts_of(name.removesuffix(_WRAPPED))


def expert_modules(
    file: SafetensorsFile,
    config: PeftConfig,
    name: str,
    tensors: Mapping[Kind, TensorInfo],
    experts: Mapping[str, ExpertMatrices],
    max_rank: int,
) -> Iterator[AdaptedModule]:
    """What the file's module has for each expert.

    Raises:
        ModelLoadError: a tensor has no partner, or its shape is that of no matrix of these experts; or the rank is not
            the config's, or above the limit.
    """
    a, b = _pair(file, name, tensors)
    parameter, matrices, is_swapped = _Matching(file, a, b, experts).found()
    count, path = len(matrices.targets), f"{name.removesuffix(_WRAPPED)}.{parameter}"
    rank, said = a.shape[0] // count, config.rank_of(path)
    if rank > max_rank:
        raise wrong(file, a, f"has rank {rank} for each of {count} experts; --max-lora-rank is {max_rank}")
    if rank != said:
        raise wrong(file, a, f"has rank {rank} for each of {count} experts, {config.where} says {said}")
    own: dict[Kind, TensorInfo] = {"a": b, "b": a} if is_swapped else {"a": a, "b": b}
    for index, target in enumerate(matrices.targets):
        take = partial(
            _taken, index=index, rank=rank, is_swapped=is_swapped, interleaved=matrices.interleaved
        )
        yield AdaptedModule(target, own, rank, config.scale_of(path, rank), take=take)


def _pair(
    file: SafetensorsFile, name: str, tensors: Mapping[Kind, TensorInfo]
) -> tuple[TensorInfo, TensorInfo]:
    for kind, info in tensors.items():
        if kind not in ("a", "b"):
            raise wrong(file, info, "is for experts, which have products alone")
        if info.dtype not in FLOATS:
            raise wrong(file, info, f"is {str(info.dtype).removeprefix('torch.')}; adapters are floats")
    pairs: tuple[tuple[Kind, Kind], ...] = (("a", "b"), ("b", "a"))
    for kind, other in pairs:
        if kind not in tensors:
            raise wrong(
                file, tensors[other], f"is there without base_model.model.{name}.lora_{kind.upper()}.weight"
            )
    return tensors["a"], tensors["b"]


@dataclass(frozen=True, slots=True)
class _Matching:
    """Which of the experts' matrices a pair of tensors is for: that of its shape."""

    file: SafetensorsFile
    a: TensorInfo
    b: TensorInfo
    experts: Mapping[str, ExpertMatrices]

    def found(self) -> tuple[str, ExpertMatrices, bool]:
        """Its name, the matrices, and whether inputs were taken for outputs."""
        ways = [
            (parameter, matrices, is_swapped)
            for parameter, matrices in self.experts.items()
            for is_swapped in (matrices.is_transposed, not matrices.is_transposed)
            if self._fits(matrices.targets[0], len(matrices.targets), is_swapped)
        ]
        # Without a gate, one matrix the other way round has the shape of the other.
        as_kept = [way for way in ways if way[2] == way[1].is_transposed]
        if ways:
            return (as_kept or ways)[0]
        sizes = " or ".join(f"[{m.targets[0].outputs}, {m.targets[0].inputs}]" for m in self.experts.values())
        problem = f"has shape {list(self.a.shape)}, its partner {list(self.b.shape)}"
        count = len(next(iter(self.experts.values())).targets)
        raise wrong(self.file, self.a, f"{problem}; the model has {count} experts with matrices {sizes}")

    def _fits(self, target: Target, count: int, is_swapped: bool) -> bool:
        inputs, outputs = (target.inputs, target.outputs)[:: -1 if is_swapped else 1]
        ranks = self.a.shape[0]
        return ranks % count == 0 < ranks and (self.a.shape, self.b.shape) == (
            (ranks, inputs),
            (outputs, ranks),
        )


def _taken(
    kind: Kind, tensor: Tensor, *, index: int, rank: int, is_swapped: bool, interleaved: bool
) -> Tensor:
    """An expert's a [r, K], or b [N, r], of what all have."""
    by_expert = (kind == "a") != is_swapped
    own = (
        tensor[index * rank : (index + 1) * rank]
        if by_expert
        else tensor[:, index :: tensor.shape[1] // rank]
    )
    own = own.t() if is_swapped else own
    return torch.cat((own[::2], own[1::2])) if interleaved and kind == "b" else own
