# SPDX-License-Identifier: Apache-2.0
"""Pooling model: any model with hidden states, with pooling heads in place of its output head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quire.config.pooling import PoolingSpec
from quire.layers.base import Layer
from quire.layers.head import HeadLinear
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.stack import Stack
from quire.pooling.models.heads import HEADS
from quire.pooling.pooler import PoolingHead


class PoolingModel(CausalLM):
    """Model whose pooled hidden states pass the body's own head, if any, and then the task's head.

    The body's output head is dropped.
    """

    is_replicated = True

    def __init__(self, body: CausalLM, spec: PoolingSpec) -> None:
        super().__init__(config=body.config)
        body.lm_head = self.lm_head = None
        self.body = body
        self.own_head = body.pool_head()
        self.pooling_head = PoolingHead(spec.head)
        self.own_heads = nn.ModuleDict({task: PoolingHead(layers) for task, layers in spec.own_heads})
        self.base_prefix = body.base_prefix
        layers = [*spec.head, *(layer for _, own in spec.own_heads for layer in own)]
        self.folders = tuple(dict.fromkeys(layer.folder for layer in layers if layer.folder))
        if spec.head_of_adapters:
            _leave_to_adapters(self)

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        hidden: Tensor = self.body(inputs, positions, step)
        return hidden

    def apply_heads(self, pooled: Tensor, task: str, adapter_rows: Tensor | None = None) -> Tensor:
        step = StepContext((), adapter_rows)
        if task in self.own_heads:
            weighed: Tensor = self.own_heads[task](pooled, step)
            return weighed
        own = pooled if self.own_head is None else self.own_head(pooled, step)
        given: Tensor = self.pooling_head(own, step)
        return given

    def base_model(self) -> CausalLM:
        return self.body

    def stack(self) -> Stack | None:
        return self.body.stack()

    def modules_after_layers(self) -> list[nn.Module]:
        return [*self.body.modules_after_layers(), self.pooling_head, self.own_heads]

    def drop_head(self) -> None:
        """Drop the heads; stages before the last do not pool."""
        self.own_head, self.pooling_head, self.own_heads = None, PoolingHead(()), nn.ModuleDict()
        self.body.drop_head()

    def loaded(self) -> None:
        self.body.loaded()

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        yield from self.body.checkpoint_layers()
        for head in (self.pooling_head, *self.own_heads.values()):
            assert isinstance(head, PoolingHead)
            yield from head.checkpoint_layers()

    def adapter_layers(self) -> Iterator[tuple[list[str], list[str], Layer]]:
        yield from self.body.adapter_layers()
        for head in (self.pooling_head, *self.own_heads.values()):
            assert isinstance(head, PoolingHead)
            yield from ((names, names, layer) for names, layer in head.checkpoint_layers())

    def leaves_out(self, tensor_name: str) -> bool:
        """Return whether a tensor is unused; a checkpoint may have a head for another use."""
        if tensor_name in self.other_stage_tensors:
            return True
        return self.body.leaves_out(tensor_name) or tensor_name.split(".")[0] in HEADS


def _leave_to_adapters(model: CausalLM) -> None:
    """Mark head layers that the checkpoint lacks as supplied by adapters."""
    for names, layer in model.checkpoint_layers():
        if isinstance(layer, HeadLinear) and names[0].split(".")[0] in HEADS:
            layer.is_of_adapters = True
