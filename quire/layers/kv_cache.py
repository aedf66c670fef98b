"""How layers get their part of the KV cache, whatever they keep in it.

Invariant: the tensors that groups share are [blocks, bytes] uint8, and a block's bytes lie in one piece. What stands in
them, and in how many planes, is the word of a layer's spec; whoever copies a block copies all of it and asks nobody.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.kernels.cpu.huge_pages import prefer_huge_pages
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec


@runtime_checkable
class Capturable(Protocol):
    """A layer whose calls may be unfit for graphs and tapes; of layers that are not asked, all are fit."""

    def why_not_captured(self) -> str | None:
        """Why the layer's calls cannot be part of a graph or a tape: a phrase for people; None if they can."""


@runtime_checkable
class CacheUser(Capturable, Protocol):
    """A layer that keeps something of each request from step to step."""

    name: str
    """Identifies the layer's cache; unique in the model."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """What this layer needs of the cache."""

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """Take the metadata of this group, and as cache this tensor, whose blocks are one or more of the spec's."""


def cache_users(model: nn.Module) -> Iterator[CacheUser]:
    """A model's layers that use the cache, from the first to the last."""
    return (module for module in model.modules() if isinstance(module, CacheUser))


def why_not_captured(model: object) -> str | None:
    """Why a model's steps cannot be part of a graph or a tape: a phrase for people; None if they can."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    asked = (module.why_not_captured() for module in modules if isinstance(module, Capturable))
    reasons = dict.fromkeys(reason for reason in asked if reason is not None)
    return " and ".join(reasons) or None


def kv_cache_specs(model: nn.Module) -> dict[str, KVCacheSpec]:
    """Layer name -> what it needs of the cache, from the first layer to the last."""
    return {layer.name: layer.kv_cache_spec() for layer in cache_users(model)}


def allocate_kv_cache(kv_config: KVCacheConfig, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors that the groups share, left as the system gives them.

    Untouched pages cost no memory, and no kernel reads a slot that was not written. On a CPU pages are large, because
    blocks lie all over them.
    """
    shapes = [(kv_config.num_blocks, block_bytes) for block_bytes in kv_config.tensor_block_bytes]
    tensors = tuple(torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes)
    if device.type == "cpu":
        for tensor in tensors:
            prefer_huge_pages(tensor)
    return tensors


def bind_kv_cache(model: nn.Module, kv_config: KVCacheConfig, tensors: Sequence[Tensor]) -> None:
    """Give each layer its group and, as its cache, the tensor that has its place in the group."""
    layers = {layer.name: layer for layer in cache_users(model)}
    assert layers.keys() == kv_config.layer_specs.keys(), "one spec for each layer with a cache"
    for group_id, group in enumerate(kv_config.groups):
        for name, tensor in zip(group.layer_names, tensors, strict=False):
            layers[name].bind(group_id, kv_config.layer_specs[name], tensor)


def cache_planes(spec: KVCacheSpec, tensor: Tensor) -> tuple[Tensor, ...]:
    """Each plane of a spec's blocks, as kernels know them, as contiguous [n, bytes] uint8, indexed by their ids.

    The planes of a block lie one behind the other, and block ids count planes, so that the first ids that a group uses
    of the pool's blocks are `KVCacheConfig.parts_per_block` apart. Each view begins at its own plane of block 0.
    """
    planes = tensor.view(-1, spec.plane_bytes)
    length = len(planes) - spec.planes + 1
    return tuple(planes[first : first + length] for first in range(spec.planes))
