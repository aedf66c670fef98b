# SPDX-License-Identifier: Apache-2.0
"""Interface between layers and the KV cache: specs, allocation, binding.

Invariant: the tensors that groups share are [blocks, bytes] uint8, and a block's bytes are contiguous. Only a layer's
spec defines a block's contents and planes; block copies move all bytes and do not interpret them.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.kernels.cpu.arena import huge_page_blocks
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec


@runtime_checkable
class Capturable(Protocol):
    """Layer that may be unfit for CUDA graphs and recorded kernel graphs; layers without this protocol are fit."""

    def why_not_captured(self) -> str | None:
        """Return why the layer's calls cannot be captured, as a phrase for users; None if they can."""


@runtime_checkable
class CacheUser(Capturable, Protocol):
    """Layer that keeps per-request state from step to step."""

    name: str
    """Identifies the layer's cache; unique in the model."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return the layer's cache requirements."""

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """Store the metadata group and the cache tensor, whose blocks are one or more of the spec's."""


def cache_users(model: nn.Module) -> Iterator[CacheUser]:
    """Return the model's layers that use the cache, in layer order."""
    return (module for module in _having(model, "kv_cache_spec") if isinstance(module, CacheUser))


def why_not_captured(model: object) -> str | None:
    """Return why a model's steps cannot be captured in a graph, as a phrase for users; None if they can."""
    modules = _having(model, "why_not_captured") if isinstance(model, nn.Module) else ()
    asked = (module.why_not_captured() for module in modules if isinstance(module, Capturable))
    reasons = dict.fromkeys(reason for reason in asked if reason is not None)
    return " and ".join(reasons) or None


def _having(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """Return the modules whose class has a method; asking a module for one that it lacks takes some 20 microseconds."""
    return (module for module in model.modules() if hasattr(type(module), method))


def kv_cache_specs(model: nn.Module) -> dict[str, KVCacheSpec]:
    """Return layer name -> cache spec, in layer order."""
    return {layer.name: layer.kv_cache_spec() for layer in cache_users(model)}


def allocate_kv_cache(kv_config: KVCacheConfig, device: torch.device) -> tuple[Tensor, ...]:
    """Allocate the tensors that the groups share, uninitialized.

    Untouched pages cost no memory, and no kernel reads a slot that was not written. On a CPU the pages are huge pages,
    because blocks are scattered over them.
    """
    shapes = [(kv_config.num_blocks, block_bytes) for block_bytes in kv_config.tensor_block_bytes]
    if device.type == "cpu":
        return tuple(huge_page_blocks(*shape) for shape in shapes)
    return tuple(torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes)


def bind_kv_cache(model: nn.Module, kv_config: KVCacheConfig, tensors: Sequence[Tensor]) -> None:
    """Bind each layer to its group and to the tensor at its index in the group."""
    layers = {layer.name: layer for layer in cache_users(model)}
    assert layers.keys() == kv_config.layer_specs.keys(), "one spec for each layer with a cache"
    for group_id, group in enumerate(kv_config.groups):
        for name, tensor in zip(group.layer_names, tensors, strict=False):
            layers[name].bind(group_id, kv_config.layer_specs[name], tensor)


def cache_planes(spec: KVCacheSpec, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return each plane of a spec's blocks as contiguous [n, bytes] uint8, indexed by kernel block ids.

    The planes of a block are adjacent, and block ids count planes: the first ids of two pool blocks of a group are
    `KVCacheConfig.parts_per_block` apart. Each view begins at its own plane of block 0.
    """
    planes = tensor.view(-1, spec.plane_bytes)
    length = len(planes) - spec.planes + 1
    return tuple(planes[first : first + length] for first in range(spec.planes))
