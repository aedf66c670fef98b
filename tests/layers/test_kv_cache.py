# SPDX-License-Identifier: Apache-2.0
"""Caches of any shape: whatever layers keep, a block of the pool is one row of each tensor, and moves as a whole."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    LatentAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    fit_states,
)
from quire.layers.kv_cache import (
    CacheUser,
    allocate_kv_cache,
    bind_kv_cache,
    cache_planes,
    kv_cache_specs,
    why_not_captured,
)
from quire.scheduler.output import SchedulerOutput
from quire.worker.block_copies import BlockCopier, copy_on_host

NUM_BLOCKS = 5


class Keeper(nn.Module):
    """A layer that keeps what its spec says, and computes nothing."""

    def __init__(self, name: str, spec: KVCacheSpec) -> None:
        super().__init__()
        self.name = name
        self.spec = spec

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.spec

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        self.group_id, self.spec = group_id, spec
        self.planes = cache_planes(spec, tensor)

    def why_not_captured(self) -> str | None:
        return f"{type(self.spec).__name__} is slow"


FULL = FullAttentionSpec(4, 2, 8, 4)
KINDS: Mapping[str, KVCacheSpec] = {
    "full": FULL,
    "window": SlidingWindowSpec(4, 2, 8, 4, sliding_window=8),
    "wide window": SlidingWindowSpec(4, 6, 8, 4, sliding_window=8),
    "int8": FullAttentionSpec(4, 1, 8, 1, scale_bytes=4),
    "latent": LatentAttentionSpec(4, 1, 12, 4),
    "state": RecurrentStateSpec(4, 256),
    "large state": RecurrentStateSpec(4, 5000),
}


def bound(kinds: list[str]) -> tuple[nn.ModuleList, KVCacheConfig, tuple[Tensor, ...]]:
    """Layers of these kinds on a cache full of zeros."""
    layers = nn.ModuleList(Keeper(f"{kind} {index}", KINDS[kind]) for index, kind in enumerate(kinds))
    specs = fit_states(kv_cache_specs(layers))
    config = KVCacheConfig(NUM_BLOCKS, group_layers(specs, 64), specs)
    tensors = allocate_kv_cache(config, torch.device("cpu"))
    for tensor in tensors:
        tensor.zero_()
    bind_kv_cache(layers, config, tensors)
    return layers, config, tensors


def entry(layer: Keeper, config: KVCacheConfig, block_id: int) -> list[Tensor]:
    """Return the planes of each kernel block in a pool block."""
    first = block_id * config.parts_per_block(config.groups[layer.group_id])
    ids = [first + index * layer.spec.planes for index in range(layer.spec.kernel_blocks)]
    return [plane[index] for index in ids for plane in layer.planes]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6))
def test_a_block_of_the_pool_is_one_row_whatever_layers_keep(kinds: list[str]) -> None:
    layers, config, tensors = bound(kinds)
    assert [tensor.shape for tensor in tensors] == [(NUM_BLOCKS, size) for size in config.tensor_block_bytes]
    for layer in layers:
        block_id = random.Random(layer.name).randrange(NUM_BLOCKS)
        planes = entry(layer, config, block_id)
        assert all(plane.is_contiguous() for plane in layer.planes)
        for number, plane in enumerate(planes, start=1):
            plane += number
        (written,) = (tensor for tensor in tensors if tensor.any())
        assert written.any(1).nonzero().tolist() == [[block_id]], layer.name
        row = torch.arange(1, len(planes) + 1).repeat_interleave(layer.spec.block_bytes // len(planes))
        assert written[block_id, : len(row)].tolist() == row.tolist(), "planes lie one behind the other"
        assert not written[block_id, len(row) :].any()
        written.zero_()


@pytest.mark.parametrize(
    "kinds",
    [["int8"], ["latent"] * 2, ["state"], ["full", "latent", "state", "window"], ["window", "large state"]],
)
def test_blocks_of_any_shape_return_unchanged_from_the_host(kinds: list[str]) -> None:
    layers, config, tensors = bound(kinds)
    for layer in layers:
        for block_id in range(1, NUM_BLOCKS):
            for plane in entry(layer, config, block_id):
                plane.random_()
    before = [tensor.clone() for tensor in tensors]
    host = [torch.zeros(3, tensor.shape[1], dtype=torch.uint8) for tensor in tensors]
    copier = BlockCopier(tensors, host, copy_on_host)
    copier.execute(SchedulerOutput(1, [], [], [], swap_outs=[(1, 2), (3, 1)]))
    for tensor in tensors:
        tensor[[1, 3]] = 0
    copier.execute(SchedulerOutput(2, [], [], [], swap_ins=[(2, 4), (1, 1)], block_copies=[(4, 3)]))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[1:], old[[3, 2, 1, 1]])


def test_layers_that_disagree_on_planes_are_not_one_group() -> None:
    _, config, _ = bound(["full", "latent", "full"])
    assert {group.spec.planes for group in config.groups} == {1, 2}
    for group in config.groups:
        assert {config.layer_specs[name].planes for name in group.layer_names} == {group.spec.planes}


def test_layer_without_capture_gives_the_reason() -> None:
    layers, _, _ = bound(["full", "full", "state"])
    assert all(isinstance(layer, CacheUser) for layer in layers)
    assert why_not_captured(layers) == "FullAttentionSpec is slow and RecurrentStateSpec is slow"
    assert why_not_captured(nn.Linear(1, 1)) is None
