# SPDX-License-Identifier: Apache-2.0
"""Packed replacement of transformers' expert tensors [E, N, K]: one packed weight each, of which used ones are read.

Invariant: a token's experts are added in the order of their numbers, whatever the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.kernels import ops
from quire.layers.base import model_dtype
from quire.layers.quantization import QuantMethod
from quire.layers.shard import WHOLE, Partition, Shard, ShardSpan
from quire.models.transformers_backend.hosted import HostedLinear, row_spans
from quire.models.transformers_backend.plan import ShardingPlan
from quire.models.transformers_backend.tensors import CheckpointView, Loaded, module_names

NAME = "quire"
"""Name of our function among transformers' expert implementations."""

RUN_WITHOUT_DATA = "batched_mm"
"""transformers' implementation that reads no tensor data, and so runs on the meta device."""


class _Down(HostedLinear):
    """Down projection of an expert; the all-reduce happens once for all experts."""

    def create_weights(self, method: QuantMethod, shard: Shard = WHOLE) -> None:
        super().create_weights(method, shard)
        self._adds_up_with = None


class PackedExperts(nn.Module):
    """Weights of each expert: `up` [N, K], which may include a gate, and `down` [K, N]."""

    def __init__(self, up: Sequence[HostedLinear], down: Sequence[HostedLinear]) -> None:
        super().__init__()
        self.up = nn.ModuleList(up)
        self.down = nn.ModuleList(down)

    @property
    def group(self) -> Group | None:
        """Group that all-reduces the output; None: it is complete."""
        down = self.down[0]
        assert isinstance(down, HostedLinear)
        return down.group


def _through_packed(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute registered experts: x [T, H], the experts of each token and their weights [T, k] -> [T, H]."""
    packed = module.packed
    assert isinstance(packed, PackedExperts)
    out = torch.zeros_like(x)
    used = torch.unique(chosen)
    for expert in used[used < len(packed.up)].tolist():
        tokens, places = torch.where(chosen == expert)
        up = packed.up[expert](x[tokens])
        rows = packed.down[expert](module._apply_gate(up) if module.has_gate else module.act_fn(up))
        out.index_add_(0, tokens, rows * weights[tokens, places, None].to(rows.dtype))
    return out if packed.group is None else ops.all_reduce(out, packed.group)


ALL_EXPERTS_FUNCTIONS.register(NAME, _through_packed)


def as_experts(
    module: Any,
    name: str,
    stored: Mapping[str, Sequence[CheckpointView]],
    config: EngineConfig,
    plan: ShardingPlan,
) -> tuple[PackedExperts, Loaded] | None:
    """Return packed weights for an experts module whose checkpoints hold experts one by one; None for any other."""
    if module.has_bias or module.is_transposed or module.has_post_expert_norm:
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    tensors = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
    if tensors.keys() != set(names):
        return None
    cuts: list[Partition] = ["output", "input"] if _is_cut(module, name, names, plan) else ["whole", "whole"]
    found = [
        list(_matrices(kind, tensors[key], stored[f"{name}.{key}"], config, partition, parts))
        for kind, key, partition, parts in zip(
            (HostedLinear, _Down), names, cuts, (2 if module.has_gate else 1, 1), strict=True
        )
    ]
    if any(len(loaded) != len(tensors[key]) for key, loaded in zip(names, found, strict=True)):
        return None
    up, down = ([layer for _, layer in loaded] for loaded in found)
    return PackedExperts(up, down), [*found[0], *found[1]]


def _is_cut(module: nn.Module, name: str, names: Sequence[str], plan: ShardingPlan) -> bool:
    """Return whether each expert is sharded by features."""
    by_plan = [plan.partition(f"{name}.{key}") for key in names] == ["output", "input"]
    return by_plan and (not module.has_gate or _gates_halves(module))


def _gates_halves(module: Any) -> bool:
    """Return whether each feature combines the same places of the first and second half."""
    gate, up = torch.linspace(-2.0, 2.0, 48, device="cpu").view(3, 16).sin().chunk(2, 1)
    part = module._apply_gate(torch.cat((gate[:, :4], up[:, :4]), 1))
    whole = module._apply_gate(torch.cat((gate, up), 1))
    return part.shape == (3, 4) and torch.allclose(part, whole[:, :4])


def _halves(spans: Sequence[ShardSpan], num_spans: int) -> Sequence[ShardSpan]:
    """Return outputs of one tensor as equal, separately sharded parts."""
    return spans if len(spans) > 1 else [ShardSpan(spans[0].size // num_spans)] * num_spans


def _matrices(
    kind: type[HostedLinear],
    tensor: Tensor,
    stored: Sequence[CheckpointView],
    config: EngineConfig,
    partition: Partition,
    num_spans: int,
) -> Iterator[tuple[list[str], HostedLinear]]:
    """Yield a layer for each expert; fewer layers if the stored tensors are no rows of one."""
    _, outputs, inputs = tensor.shape
    parts: dict[int, list[CheckpointView]] = defaultdict(list)
    for part in sorted(stored, key=lambda part: part.view.storage_offset()):
        parts[part.view.storage_offset() // (outputs * inputs)].append(part)
    for _, own in sorted(parts.items()):
        spans = row_spans(own, (outputs, inputs))
        if spans is None or sum(span.size for span in spans) != outputs:
            return
        names = module_names(own)
        yield (
            names,
            kind(
                in_features=inputs,
                out_features=outputs,
                bias=False,
                dtype=model_dtype(config),
                name=names[0],
                partition=partition,
                spans=_halves(spans, num_spans) if partition == "output" else spans,
            ),
        )
