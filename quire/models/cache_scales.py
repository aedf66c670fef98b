# SPDX-License-Identifier: Apache-2.0
"""Loading of a checkpoint's KV cache scales into attention layers with a matching cache dtype."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.attention import Attention
from quire.layers.attention_parts import CacheScales, for_all_heads
from quire.layers.base import device_type
from quire.layers.shard import WHOLE, Shard
from quire.models.base import CausalLM
from quire.models.weights import open_files

logger = logging.getLogger(__name__)

_NAMES = (
    *("{kind}_scale", "attn.{kind}_scale", "{kind}_proj.{kind}_scale"),
    *("{kind}_proj.output_scale", "kv_scale"),
)
"""Names of scales after the attention block's name; "kv_scale" is for both keys and values."""
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def load_cache_scales(model: CausalLM, shard: Shard = WHOLE) -> None:
    """Load the scales of all layers whose cache dtype is the one that the checkpoint's scales are for.

    A missing E4M3 scale is 1. An int8 layer without both scales computes its own per vector.

    Raises:
        ModelLoadError: a scale is invalid, or has another number of heads; names file and tensor.
    """
    config = model.config
    says = config.arch.quantization
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    codes = None if says is None else says.cache_scales
    layers = [layer for layer in layers if codes is not None and layer.kv_dtype == _DTYPES[codes]]
    if not layers or config.load.load_format == "dummy":
        return
    files = _Files(model)
    for layer in layers:
        heads = layer.all_kv_heads
        keys, values = (files.of(layer, kind, heads) for kind in ("k", "v"))
        if codes == "int8" and keys is not None and values is not None:
            scales = CacheScales.of_rank(keys, values, shard, layer.name)
            layer.int8_scales = torch.stack((scales.keys, scales.values)).squeeze(-1).contiguous()
        elif codes == "e4m3" and (keys is not None or values is not None):
            one = torch.ones(heads)
            scales = CacheScales.of_rank(
                one if keys is None else keys, one if values is None else values, shard, layer.name
            )
            layer.cache_scales = scales.to(device_type(config))
    found = sum(layer.cache_scales is not None or layer.int8_scales is not None for layer in layers)
    others = "1" if codes == "e4m3" else "one for each vector"
    logger.info(
        "scales of keys and values: %d of %d layers have them, others get %s", found, len(layers), others
    )


class _Files:
    """Files with the checkpoint's names of the blocks that contain our layers."""

    def __init__(self, model: CausalLM) -> None:
        self._files = open_files(Path(model.config.model_dir), part_of=model.config.arch.part_of)
        self._parents = {_parent(layer.name): _parent(names[0]) for names, layer in model.checkpoint_layers()}

    def of(self, layer: Attention, kind: str, heads: int) -> Tensor | None:
        block = self._parents.get(_parent(layer.name))
        for name in (f"{block}.{each.format(kind=kind)}" for each in _NAMES):
            for file in self._files:
                if name in file.tensors:
                    info = file.tensors[name]
                    read = file.part(info, tuple(slice(0, size) for size in info.shape))
                    try:
                        return for_all_heads(read, heads)
                    except ValueError as error:
                        raise ModelLoadError(f"{file.path}: tensor {info.name!r} {error}") from error
        return None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
