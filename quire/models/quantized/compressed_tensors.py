"""The config of compressed-tensors: groups of modules, each with the form of its weights and activations."""

from __future__ import annotations

import re

from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.errors import UnsupportedModelError
from quire.models.json_object import JsonObject
from quire.models.quantized.fp8 import UNREAD
from quire.models.quantized.rules import EVERYTHING, beginning, block_shape, names, notes

_CLASSES = ("Linear", "LinearBase", "ParallelLMHead")
_UNREAD = (*UNREAD, r"\.(weight_shape|input_zero_point|input_global_scale|output_zero_point)$")
_PACKED_BITS = (2, 3, 4, 8)
_INTEGERS, _PACKED = ("int-quantized", "naive-quantized"), "pack-quantized"
_FLOATS = ("float-quantized", "naive-quantized")
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"


def read_compressed_tensors(config: JsonObject) -> CheckpointQuantization:
    """`ignore` and `targets` name modules, classes of modules, or, after "re:", the beginnings of names."""
    config.only("transform_config", {})
    sparsity = config.child("sparsity_config")
    sparsity.only("format", "dense")
    rules = [EncodingRule(_pattern(config, "ignore", name), None) for name in names(config, "ignore")]
    groups, otherwise = config.child("config_groups"), notes(config, "kv_cache_scheme")
    for name in groups.values:
        group = groups.child(name)
        otherwise += notes(group, "input_activations")
        encoding = _encoding(group, group.text("format", config.text("format", "dense")))
        rules += [
            EncodingRule(_pattern(group, "targets", target), encoding) for target in group.texts("targets")
        ]
    # Names that are spelt out come before classes of modules.
    rules.sort(key=lambda rule: rule.encoding is not None and rule.pattern == EVERYTHING)
    return CheckpointQuantization("compressed-tensors", tuple(rules), _UNREAD, otherwise)


def _pattern(config: JsonObject, key: str, name: str) -> str:
    if name in _CLASSES:
        return EVERYTHING
    if not name.startswith("re:"):
        return rf"(.*\.)?{re.escape(name)}"
    return beginning(config, key, name.removeprefix("re:"))


def _encoding(group: JsonObject, form: str) -> Encoding:
    """That of a group's weights."""
    group.only("output_activations")
    weights = group.child("weights")
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
    raise UnsupportedModelError(
        f"{group.where}: format = {form!r} with {bits} bits of type {kind} is not supported"
    )


def _packed(weights: JsonObject, bits: int) -> Encoding:
    if bits not in _PACKED_BITS:
        raise weights.unsupported("num_bits", f"one of {', '.join(map(str, _PACKED_BITS))}")
    strategy = weights.choice("strategy", ("channel", "group"))
    options = {
        "bits": bits,
        "group_size": weights.integer("group_size") if strategy == "group" else 0,
        "symmetric": weights.flag("symmetric", True),
        "reordered": strategy == "group" and weights.get("actorder") in ("group", True),
    }
    return Encoding("packed_integers", options)


def _grid(weights: JsonObject) -> dict[str, int]:
    """The `Grid` of its scales."""
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        rows, columns = block_shape(weights, "block_structure")
        return {"grid_outputs": rows, "grid_inputs": columns}
    if strategy == "group":
        return {"grid_outputs": 1, "grid_inputs": weights.integer("group_size")}
    return {"grid_outputs": int(strategy == "channel"), "grid_inputs": 0}
