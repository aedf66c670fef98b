# SPDX-License-Identifier: Apache-2.0
"""Encoder of images by transformers' module, with the checkpoint's weights loaded by quire.

Invariant: an item is computed alone; its linear layers and attention are ours, and torch computes the rest on one
thread. So its embeddings have the same bits in every order and on any number of threads. All of an item is one slice:
streams wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels import ops
from quire.layers.base import Layer, activation_dtype
from quire.models.json_object import JsonObject
from quire.models.transformers_backend.tensors import (
    CheckpointView,
    HeldTensor,
    compute_buffers,
    held_tensors,
    stored_tensors,
)
from quire.multimodal.towers.base import Arrays, Slices, Tower, sequences, torch_on_one_thread
from quire.worker.media_rows import Embeddings

_NAME = "quire-encoder"
"""Name of our function among transformers' attention implementations."""
_HEAD_UNIT = 8
"""Head sizes are padded with zeros to a multiple of this, as the kernels require."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of all positions to one another: [B, h, n, D] -> [B, n, h, D]."""
    if attention_mask is not None and not _hides_nothing(attention_mask):
        raise UnsupportedModelError(
            "its encoder hides some positions of an image from others, which is not computed"
        )
    count, _, length, size = query.shape
    wider = (0, -size % _HEAD_UNIT)
    q, k, v = (F.pad(x.transpose(1, 2).flatten(0, 1), wider).contiguous() for x in (query, key, value))
    scale = size**-0.5 if options.get("scaling") is None else options["scaling"]
    found = ops.bidirectional_attention(q, k, v, sequences([length] * count, query.device), scale)
    return found[..., :size].reshape(count, length, -1, size), None


def _hides_nothing(mask: Tensor) -> bool:
    return bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all())


AttentionInterface.register(_NAME, _attend)


class HostedTower(Tower):
    """All of a model of transformers but its language model.

    Raises:
        UnsupportedModelError: the installed transformers has no such model, or it has no `get_image_features`.
    """

    def __init__(self, *, config: EngineConfig, whole: JsonObject) -> None:
        super().__init__(config=config)
        model: Any = _build(config, whole)
        stored = self._names_alone(stored_tensors(model))
        compute_buffers(model)
        inner = model.base_model
        language_model = next(
            name for name, module in inner.named_children() if module is model.get_decoder()
        )
        inner._modules[language_model] = None
        self.parts = tuple(f"{name}." for name, module in inner.named_children())
        self._theirs: tuple[Any] = (
            inner,
        )  # in a tuple, so that nn.Module does not take its parameters for ours
        modules = [*inner.modules()]
        self.held = nn.ModuleList(held_tensors(model, modules, activation_dtype(config), stored))
        self.unused = tuple(model._keys_to_ignore_on_load_unexpected or ())

    def _names_alone(self, stored: Mapping[str, Sequence[CheckpointView]]) -> dict[str, list[CheckpointView]]:
        part_of = self.config.arch.part_of
        assert part_of is not None, "it has a tower"
        return {
            name: [replace(part, name=part_of.name_alone(part.name)) for part in parts]
            for name, parts in stored.items()
        }

    def checkpoint_layers(self) -> Iterator[tuple[list[str], Layer]]:
        """See `CausalLM.checkpoint_layers`."""
        for layer in self.held:
            assert isinstance(layer, HeldTensor), "made so"
            yield [layer.name], layer

    def slices(self, arrays: Arrays) -> Slices:
        inner = self._theirs[0].to(self.device)  # buffers, which are of the host
        given = {name: self._given(array) for name, array in arrays.items()}
        with torch_on_one_thread():
            found = inner.get_image_features(**given)
        features = getattr(found, "pooler_output", found)
        rows = features if isinstance(features, Tensor) else torch.cat([*features])
        yield
        return Embeddings(rows.reshape(-1, rows.shape[-1]))

    def _given(self, array: NDArray[Any]) -> Tensor:
        if np.issubdtype(array.dtype, np.floating):
            return self.to_device(array)
        return torch.from_numpy(array).to(self.device)


def _build(config: EngineConfig, whole: JsonObject) -> PreTrainedModel:
    """Return the whole model without memory."""
    assert config.arch.part_of is not None, "it has a tower"
    name = config.arch.part_of.architecture
    model_cls = getattr(transformers, name, None)
    if not (isinstance(model_cls, type) and issubclass(model_cls, PreTrainedModel)):
        raise UnsupportedModelError(
            f"the installed transformers has no {name}, whose encoder of images is needed"
        )
    kind: Any = model_cls
    theirs = kind.config_class.from_dict(json.loads(json.dumps(dict(whole.values))))
    model: Any = kind._from_config(theirs, dtype=activation_dtype(config))
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._supports_attention_backend:
            module.config._attn_implementation = _NAME
    if not hasattr(model.base_model, "get_image_features"):
        raise UnsupportedModelError(f"{name} of transformers has no get_image_features")
    built: PreTrainedModel = model.eval()
    return built
