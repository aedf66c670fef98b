# SPDX-License-Identifier: Apache-2.0
"""Mapping from a checkpoint's tensors to a transformers model's, and layers for tensors without a layer of ours.

transformers defines for each model how checkpoint names and separately stored experts become its parameters. That
conversion is run backwards here on tensors without memory, whose views show where each stored tensor lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from quire.errors import UnsupportedModelError
from quire.layers.base import Layer, parameter
from quire.layers.slot import Slot
from quire.models.transformers_backend.rows import RowWise

Loaded = list[tuple[list[str], Layer]]
"""Layers with parameters, each with the names of the checkpoint modules that it holds."""


@dataclass(frozen=True)
class CheckpointView:
    """Tensor of the checkpoint: a view of a model tensor."""

    name: str
    view: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the same view of a tensor of the model's shape."""
        return tensor.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


def module_names(parts: Sequence[CheckpointView]) -> list[str]:
    """Return the checkpoint modules of these weights."""
    return [part.name.removesuffix(".weight") for part in parts]


def stored_tensors(model: PreTrainedModel) -> Mapping[str, Sequence[CheckpointView]]:
    """Return model tensor name -> the checkpoint tensors that make it up.

    Raises:
        UnsupportedModelError: its checkpoints have another form, from which no part can be copied unchanged.
    """
    ours = {name: torch.empty_like(tensor) for name, tensor in kept_tensors(model).items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in ours.items()}
    with _Views():
        theirs = revert_weight_conversion(model, dict(ours))
    stored: dict[str, list[CheckpointView]] = defaultdict(list)
    for name, view in theirs.items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None:
            raise UnsupportedModelError(f"its checkpoints hold {name} in a form that is computed, not copied")
        stored[owner].append(CheckpointView(name, view))
    return stored


class _Views(TorchFunctionMode):
    """Mode in which `contiguous` returns the view itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def kept_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the stored parameters and buffers, each once: a tied one under the name that is stored."""
    tied = set(model.all_tied_weights_keys or ())
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


class HeldTensor(Layer):
    """Tensor that transformers' modules compute with, in the activations' dtype.

    `places` are the (module, attribute name) that have it.
    """

    tensor: nn.Parameter

    def __init__(
        self,
        name: str,
        like: Tensor,
        dtype: torch.dtype,
        stored: Sequence[CheckpointView],
        places: Sequence[tuple[nn.Module, str]],
    ) -> None:
        super().__init__(name)
        self.tensor = parameter(*like.shape, dtype=dtype if like.is_floating_point() else like.dtype)
        self._stored = tuple(stored)
        self._places = tuple(places)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        init = _init(self.name, self.tensor)
        for stored in self._stored:
            target = stored.of(self.tensor.data)
            if self.tensor.is_floating_point():
                yield stored.name, Slot(target, init)
            else:
                yield stored.name, Slot(target, "zeros", dtypes=(self.tensor.dtype,))

    def finish_loading(self) -> None:
        for module, name in self._places:
            row_wise = None if isinstance(module, nn.Embedding) else RowWise.of(self.tensor.data)
            if row_wise is not None and name in module._parameters:
                del module._parameters[name]
                module.__dict__[name] = row_wise
            elif name in module._parameters:
                module._parameters[name] = self.tensor
            else:
                module._buffers[name] = self.tensor.data

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        self.finish_loading()


def _init(name: str, tensor: Tensor) -> Literal["normal", "ones", "zeros"]:
    if tensor.dim() > 1:
        return "normal"
    return "ones" if name.endswith("weight") else "zeros"


def held_tensors(
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    dtype: torch.dtype,
    stored: Mapping[str, Sequence[CheckpointView]],
) -> Iterator[HeldTensor]:
    """Yield one layer for each tensor owned by these modules."""
    names = {id(tensor): name for name, tensor in kept_tensors(model).items()}
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for module in modules:
        own = module._parameters | {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            if tensor is not None:
                tensors[id(tensor)] = tensor
                places[id(tensor)].append((module, name))
    for key, tensor in tensors.items():
        if key not in names:
            module, name = places[key][0]
            path = next(path for path, one in model.named_modules() if one is module)
            raise UnsupportedModelError(
                f"{path}.{name} is had by several layers under names that all mean another"
            )
        yield HeldTensor(names[key], tensor, dtype, stored[names[key]], places[key])


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds, such as frequencies, on the host.

    transformers does so after building a model on the meta device: `_init_weights` of the innermost model around a
    module creates them again.

    Raises:
        UnsupportedModelError: transformers does not initialize one of them.
    """
    with torch.device("cpu"), torch.no_grad():
        for path, module, owner in _with_owners(model, model):
            unstored = module._non_persistent_buffers_set
            marks = {
                name: _unwritten(like) for name, like in module.named_buffers("", False) if name in unstored
            }
            module._buffers.update({name: mark.clone() for name, mark in marks.items()})
            if marks:
                owner._init_weights(module)
            for name, mark in marks.items():
                if torch.equal(getattr(module, name), mark):
                    raise UnsupportedModelError(
                        f"{path}.{name} is made where the model is built, and only there"
                    )


def _with_owners(
    module: nn.Module, owner: PreTrainedModel, path: str = ""
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield the path of each module with the innermost model that it is in."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield path, module, owner
    for name, child in module.named_children():
        yield from _with_owners(child, owner, f"{path}.{name}" if path else name)


def _unwritten(like: Tensor) -> Tensor:
    """Return a tensor of a marker value that no computation produces."""
    mark = False if like.dtype == torch.bool else -12345.0 if like.is_floating_point() else -101
    return torch.full(like.shape, mark, dtype=like.dtype)
