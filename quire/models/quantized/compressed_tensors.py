# SPDX-License-Identifier: Apache-2.0
"""Config of compressed-tensors: groups of modules, each with the form of its weights and activations."""

from __future__ import annotations

import re
from dataclasses import replace

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, EncodingRule
from quire.errors import UnsupportedModelError
from quire.models.json_object import JsonObject
from quire.models.quantized.fp8 import UNREAD
from quire.models.quantized.rules import EVERYTHING, beginning, block_shape, cache_scales, names, notes

_CLASSES = ("Linear", "LinearBase", "ParallelLMHead")
_TABLES = r"(.*\.)?(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)"
"""Names of token embeddings in model families."""
_UNREAD = (*UNREAD, r"\.(weight_shape|weight_g_idx|input_zero_point|input_global_scale|output_zero_point)$")
_KEYS = (
    *("quant_method", "version", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config"),
    *("transform_config", "moe_sparsity_config", "quantization_status", "global_compression_ratio"),
    *("run_compressed", "dequantize"),  # load options of transformers
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGUMENTS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype"),  # implied by the files
    *("observer", "observer_kwargs"),  # calibration of scales
)
"""Known keys of a config: all others are refused, since they may change the meaning of numbers."""
_PACKED_BITS = (2, 3, 4, 8)
_ROUNDED = (("token", True), ("group", True), ("tensor", False))
"""Strategies of activations that round each token by itself, and whether scales are computed, not read."""
_INTEGERS, _PACKED = ("int-quantized", "naive-quantized"), "pack-quantized"
_FLOATS = ("float-quantized", "naive-quantized")
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"


def read_compressed_tensors(config: JsonObject) -> CheckpointQuantization:
    """Read the config; `ignore` and `targets` name modules, classes of modules, or, after "re:", name prefixes."""
    config.knows(*_KEYS)
    for key in ("transform_config", "moe_sparsity_config"):
        config.only(key, {})
    config.child("sparsity_config").only("format", "dense")
    rules = [EncodingRule(_pattern(config, "ignore", name), None) for name in names(config, "ignore")]
    groups, otherwise = config.child("config_groups"), notes(config, "kv_cache_scheme")
    for name in groups.values:
        group = groups.child(name)
        group.knows(*_GROUP_KEYS)
        group.only("output_activations")
        otherwise += notes(group, "input_activations")
        if "weights" not in group:  # for attention or the cache
            continue
        encoding = _encoding(group, group.text("format", config.text("format", "dense")))
        rules += [
            EncodingRule(_pattern(group, "targets", target), encoding) for target in group.texts("targets")
        ]
    # Full names come before classes of modules.
    rules.sort(key=lambda rule: rule.encoding is not None and rule.pattern == EVERYTHING)
    otherwise = tuple(dict.fromkeys(otherwise))
    return CheckpointQuantization(
        "compressed-tensors", tuple(rules), _UNREAD, cache_scales(config), otherwise
    )


def _pattern(config: JsonObject, key: str, name: str) -> str:
    if name in _CLASSES:
        return EVERYTHING
    if name == "Embedding":
        return _TABLES
    if not name.startswith("re:"):
        return rf"(.*\.)?{re.escape(name)}"
    return beginning(config, key, name.removeprefix("re:"))


def _encoding(group: JsonObject, form: str) -> Encoding:
    """Return the encoding of a group's weights."""
    weights = group.child("weights")
    weights.knows(*_ARGUMENTS)
    found = _of_weights(weights, form)
    if found is None:
        said = f"{weights.get('num_bits')} bits of type {weights.get('type')}"
        raise UnsupportedModelError(f"{group.where}: format = {form!r} with {said} is not supported")
    return replace(found, activations=_activations(group) if "input_activations" in group else None)


def _activations(group: JsonObject) -> Activations:
    said = group.child("input_activations")
    bits, kind = said.integer("num_bits", 8), said.choice("type", ("int", "float"), "int")
    strategy, dynamic = said.text("strategy", "tensor"), said.get("dynamic") not in (None, False)
    if bits != 8:
        return Activations(unlike=f"{bits} bits")
    if (strategy, dynamic) not in _ROUNDED:
        return Activations(unlike=f"{'dynamic' if dynamic else 'static'} scales with strategy {strategy!r}")
    return Activations(
        codes="int8" if kind == "int" else "e4m3",
        group=said.integer("group_size") if strategy == "group" else 0,
        static=not dynamic,
        symmetric=said.flag("symmetric", True),
    )


def _of_weights(weights: JsonObject, form: str) -> Encoding | None:
    """Return the encoding of weights; None if there is no such form."""
    bits, kind = weights.integer("num_bits"), weights.choice("type", ("int", "float"), "int")
    if weights.flag("dynamic", False):
        raise weights.unsupported("dynamic", "false")
    if form == _PACKED and kind == "int":
        return _packed(weights, bits)
    if form in _INTEGERS and kind == "int" and bits == 8:
        return Encoding("int8", _grid(weights))
    if form in _FLOATS and kind == "float" and bits == 8:
        return Encoding("fp8", _grid(weights))
    if form in (_NVFP4, _MXFP4) and kind == "float" and bits == 4:
        return Encoding("nvfp4" if form == _NVFP4 else "mxfp4")
    return None


def _packed(weights: JsonObject, bits: int) -> Encoding:
    if bits not in _PACKED_BITS:
        raise weights.unsupported("num_bits", f"one of {', '.join(map(str, _PACKED_BITS))}")
    strategy = weights.choice("strategy", ("channel", "group"))
    options = {
        "bits": bits,
        "group_size": weights.integer("group_size") if strategy == "group" else 0,
        "symmetric": weights.flag("symmetric", True),
        "reordered": strategy == "group" and weights.get("actorder") in ("group", "dynamic", True),
    }
    return Encoding("packed_integers", options)


def _grid(weights: JsonObject) -> dict[str, int]:
    """Return the `Grid` of the scales."""
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        rows, columns = block_shape(weights, "block_structure")
        return {"grid_outputs": rows, "grid_inputs": columns}
    if strategy == "group":
        return {"grid_outputs": 1, "grid_inputs": weights.integer("group_size")}
    return {"grid_outputs": int(strategy == "channel"), "grid_inputs": 0}
