"""Reads an adapter's directory, in the layout of PEFT, into the form in which layers take it.

Invariant: all that the directory holds fits the model and the limits, or nothing of it is used; what does not fit is
named, with its file, its tensor and the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.lora import LoraStacks
from quire.layers.slot import FLOATS, length
from quire.lora.peft_config import WEIGHTS_NAME, PeftConfig, read_peft_config
from quire.lora.targets import Target, Targets
from quire.models.safetensors_file import SafetensorsFile, TensorInfo

_PICKLED_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_SHRINKS, _EXPANDS = ".lora_A.weight", ".lora_B.weight"
_REFUSED = {
    ".lora_magnitude_vector": "DoRA is not supported",
    ".lora_B.bias": "biases of adapters are not supported",
    ".lora_embedding_A": "adapters of embeddings are not supported",
    ".lora_embedding_B": "adapters of embeddings are not supported",
}
"""Ends of tensors' names, and what to say of them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on the host: by the index of each layer that it changes, stacks with a single slot."""

    layers: Mapping[int, LoraStacks]

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return sum(stacks.nbytes for stacks in self.layers.values())


@dataclass(frozen=True, slots=True)
class _Module:
    """What the file has of a module: A [r, inputs] and B [outputs, r]."""

    a: TensorInfo
    b: TensorInfo
    target: Target
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def read_adapter(directory: Path, targets: Targets, max_rank: int, dtype: torch.dtype) -> Adapter:
    """The adapter of a directory, for the model that has these targets, its weights rounded to `dtype`.

    Raises:
        ModelLoadError: a file is missing or corrupt, or a tensor does not fit the model or the largest rank.
        UnsupportedModelError: the config asks for what quire does not do.
    """
    config = read_peft_config(directory)
    file = SafetensorsFile(_weights_file(directory))
    modules = list(_modules(file, config, targets, max_rank))
    ranks: dict[int, int] = {}
    for module in modules:
        for place in module.target.places:
            ranks[place.layer] = max(ranks.get(place.layer, 0), module.rank)
    layers = {index: _stacks(targets, index, rank, dtype) for index, rank in ranks.items()}
    for module in modules:
        _fill(layers, module, file.tensor(module.a), file.tensor(module.b), targets)
    return Adapter(layers)


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS_NAME
    if not path.exists() and (directory / _PICKLED_NAME).exists():
        raise ModelLoadError(
            f"{directory / _PICKLED_NAME}: pickled weights cannot be used, convert to safetensors"
        )
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file")
    return path


def _modules(file: SafetensorsFile, config: PeftConfig, targets: Targets, max_rank: int) -> Iterator[_Module]:
    """What the file has, each checked by itself.

    Raises:
        ModelLoadError: a tensor has no place, no partner, or the wrong shape or dtype.
    """
    shrinks = {_module_of(file, info): info for info in file.tensors.values() if not _expands(info)}
    expands = {_module_of(file, info): info for info in file.tensors.values() if _expands(info)}
    if not shrinks and not expands:
        raise ModelLoadError(f"{file.path}: there is no tensor in it")
    for name in shrinks.keys() ^ expands.keys():
        alone = shrinks.get(name) or expands[name]
        other = _SHRINKS if _expands(alone) else _EXPANDS
        raise _wrong(file, alone, f"is there without {_PREFIX}{name}{other}")
    for name, a in shrinks.items():
        target, b = targets.modules.get(name), expands[name]
        if target is None:
            raise _wrong(
                file, a, f"is for {name}, which is no linear layer of the model that adapters can change"
            )
        rank = _check_shapes(file, a, b, target)
        if rank > max_rank:
            raise _wrong(file, a, f"has rank {rank}; --max-lora-rank is {max_rank}")
        if rank != config.rank_of(name):
            raise _wrong(file, a, f"has rank {rank}, {config.where} says {config.rank_of(name)}")
        yield _Module(a, b, target, config.scale_of(name, rank))


def _expands(info: TensorInfo) -> bool:
    return info.name.endswith(_EXPANDS)


def _module_of(file: SafetensorsFile, info: TensorInfo) -> str:
    """The module that a tensor is for."""
    for end, problem in _REFUSED.items():
        if end in info.name:
            raise _wrong(file, info, f"cannot be used: {problem}")
    end = _EXPANDS if _expands(info) else _SHRINKS
    if not info.name.startswith(_PREFIX) or not info.name.endswith(end):
        raise _wrong(
            file,
            info,
            f"is neither {_PREFIX}<module>{_SHRINKS} nor {_EXPANDS}: whole modules (modules_to_save) are not supported",
        )
    return info.name.removeprefix(_PREFIX).removesuffix(end)


def _check_shapes(file: SafetensorsFile, a: TensorInfo, b: TensorInfo, target: Target) -> int:
    """The rank."""
    for info in (a, b):
        if info.dtype not in FLOATS:
            raise _wrong(file, info, f"is {str(info.dtype).removeprefix('torch.')}; adapters are floats")
    rank = a.shape[0] if a.shape else 0
    for info, shape in ((a, (rank, target.inputs)), (b, (target.outputs, rank))):
        if info.shape != shape or not rank:
            raise _wrong(file, info, f"has shape {list(info.shape)}; the model's layer implies {list(shape)}")
    return rank


def _wrong(file: SafetensorsFile, info: TensorInfo, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{file.path}: tensor {info.name!r} {problem}")


def _stacks(targets: Targets, index: int, rank: int, dtype: torch.dtype) -> LoraStacks:
    own = targets.layers[index]
    return LoraStacks.empty(1, own.parts, length(own.layer.columns), rank, dtype, torch.device("cpu"))


def _fill(layers: Mapping[int, LoraStacks], module: _Module, a: Tensor, b: Tensor, targets: Targets) -> None:
    """Put a module's weights, as far as this rank has them, where its outputs are made."""
    rank = module.rank
    for place in module.target.places:
        stacks, layer = layers[place.layer], targets.layers[place.layer].layer
        stacks.a[0, place.part, :, :rank] = a[:, layer.columns].t()
        stacks.b[0, :rank, place.piece.place] = b[place.piece.rows].t()
        stacks.scales[0, place.part] = module.scale
        stacks.ranks[0, place.part] = rank
