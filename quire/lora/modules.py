"""What an adapter's file has for each module of the model, in the layout of PEFT.

Invariant: every tensor of the file is for one module, and fits it, its partners and the limits, before any is read;
what does not is named, with its file, its tensor and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.errors import ModelLoadError
from quire.layers.slot import FLOATS
from quire.lora.peft_config import PeftConfig
from quire.lora.targets import Target, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

Kind = Literal["a", "b", "magnitude", "expand_bias", "bias"]
"""A module's tensors: the product b @ a, [outputs, r] and [r, inputs]; and, of [outputs] each, the lengths of the rows
of weight and product together (S. Liu et al., 2024, arXiv:2402.09353), a bias of b, and one in place of the module's
own."""

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
}
"""Ends of tensors' names; the first that fits counts."""
_OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")
"""Ends of the names of tensors of modules whose inputs are tokens, and of no others."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """What the file has of a module: a product of a rank, which is scaled, biases, or both."""

    target: Target
    tensors: Mapping[Kind, TensorInfo]
    rank: int
    """0: it has no product."""
    scale: float


def adapted_modules(
    file: SafetensorsFile, config: PeftConfig, targets: Targets, max_rank: int
) -> list[AdaptedModule]:
    """All that the file has.

    Raises:
        ModelLoadError: a tensor has no place, no partner, or the wrong shape or dtype.
    """
    modules: dict[str, dict[Kind, TensorInfo]] = {}
    for info in file.tensors.values():
        name, kind = _module_of(file, info)
        modules.setdefault(name, {})[kind] = info
    if not modules:
        raise ModelLoadError(f"{file.path}: there is no tensor in it")
    return [
        _Checked(file, config, name, tensors, targets).module(max_rank) for name, tensors in modules.items()
    ]


def _module_of(file: SafetensorsFile, info: TensorInfo) -> tuple[str, Kind]:
    """The module that a tensor is for, and what it is of it."""
    for end, kind in _ENDS.items():
        if info.name.startswith(_PREFIX) and info.name.endswith(end):
            return info.name.removeprefix(_PREFIX).removesuffix(end), kind
    raise wrong(
        file,
        info,
        f"is neither {_PREFIX}<module>.lora_A.weight nor .lora_B.weight: whole modules (modules_to_save) are not"
        " supported",
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """A module by the names of its tensors' kinds."""

    file: SafetensorsFile
    config: PeftConfig
    name: str
    tensors: Mapping[Kind, TensorInfo]
    targets: Targets

    def module(self, max_rank: int) -> AdaptedModule:
        """The module, if all of it fits."""
        target = self._target()
        self._check_partners()
        rank = next(iter(self.tensors["a"].shape), 0) if "a" in self.tensors else 0
        shapes: dict[Kind, tuple[int, ...]] = {"a": (rank, target.inputs), "b": (target.outputs, rank)}
        for kind, info in self.tensors.items():
            self._check_tensor(info, shapes.get(kind, (target.outputs,)))
        if rank:
            self._check_rank(rank, max_rank)
        scale = self.config.scale_of(self.name, rank) if rank else 0.0
        return AdaptedModule(target, self.tensors, rank, scale)

    def _target(self) -> Target:
        target = self.targets.modules.get(self.name)
        if target is None:
            problem = f"is for {self.name}, which is no layer of the model that adapters can change"
            raise wrong(self.file, next(iter(self.tensors.values())), problem)
        if "bias" in self.tensors and not self.targets.has_bias(target):
            raise wrong(self.file, self.tensors["bias"], "is a bias, and the model's layer has none")
        self._check_kind(target)
        return target

    def _check_kind(self, target: Target) -> None:
        """Tables have tensors of their own, and lengths of their columns nobody here knows."""
        for info in self.tensors.values():
            if info.name.endswith(_OF_TABLES) != target.is_table:
                kind = "an embedding" if target.is_table else "no embedding"
                raise wrong(self.file, info, f"is for {self.name}, which is {kind}")
            if target.is_table and self.config.is_dora:
                raise wrong(self.file, info, "is of an embedding, for which use_dora is not supported")

    def _check_partners(self) -> None:
        """All tensors of a product are there, or none of them; that of DoRA where the config says so."""
        product = {kind: info for kind, info in self.tensors.items() if kind != "bias"}
        needs: list[Kind] = ["a", "b", "magnitude"] if self.config.is_dora else ["a", "b"]
        for kind in needs if product else ():
            if kind not in product:
                info = next(iter(product.values()))
                ends = [end for end, other in _ENDS.items() if other == kind]
                end = ends[-1] if info.name.endswith(_OF_TABLES) else ends[0]
                raise wrong(self.file, info, f"is there without {_PREFIX}{self.name}{end}")
        if "magnitude" in product and not self.config.is_dora:
            raise wrong(
                self.file, product["magnitude"], f"is DoRA's, and {self.config.where} says no use_dora"
            )
        if "expand_bias" in product and self.config.is_dora:
            raise wrong(self.file, product["expand_bias"], "is a bias, which DoRA has no place for")

    def _check_rank(self, rank: int, max_rank: int) -> None:
        said = self.config.rank_of(self.name)
        if rank > max_rank:
            raise wrong(self.file, self.tensors["a"], f"has rank {rank}; --max-lora-rank is {max_rank}")
        if rank != said:
            raise wrong(self.file, self.tensors["a"], f"has rank {rank}, {self.config.where} says {said}")

    def _check_tensor(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        if info.dtype not in FLOATS:
            dtype = str(info.dtype).removeprefix("torch.")
            raise wrong(self.file, info, f"is {dtype}; adapters are floats")
        if info.shape != shape or 0 in shape:
            raise wrong(
                self.file, info, f"has shape {list(info.shape)}; the model's layer implies {list(shape)}"
            )


def wrong(file: SafetensorsFile, info: TensorInfo, problem: str) -> ModelLoadError:
    """What is to be said of a tensor."""
    return ModelLoadError(f"{file.path}: tensor {info.name!r} {problem}")
