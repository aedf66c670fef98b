# SPDX-License-Identifier: Apache-2.0
"""Configs of bitsandbytes, HQQ and torchao, as transformers writes them.

HQQ's has options for all linear layers, or for each kind by its name; torchao's the name of a config class.
"""

from __future__ import annotations

import re

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, EncodingRule, Option
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import EVERYTHING, HEAD, all_but_head, skipping, whole

_BITS = (1, 2, 3, 4, 8)
_UNREAD = (
    r"\.(nbits|group_size|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|compute_dtype)$",
    r"\.(offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero)$",
)
"""Tensors that repeat HQQ's options for each weight."""


def read_hqq(config: JsonObject) -> CheckpointQuantization:
    """Read the config; a layer's kind is its name without the number of its block, such as "self_attn.q_proj"."""
    options = config.child("quant_config")
    rules = skipping(config, "skip_modules")
    if "weight_quant_params" in options:
        rules += all_but_head(_hqq_encoding(options))
    else:
        rules += [
            EncodingRule(rf".*\.{re.escape(kind)}", _hqq_encoding(options.child(kind)))
            for kind in options.values
        ]
    return CheckpointQuantization("hqq", tuple(rules), _UNREAD)


def _hqq_encoding(options: JsonObject) -> Encoding:
    for nested in ("scale_quant_params", "zero_quant_params"):
        options.only(nested)
    weights = options.child("weight_quant_params")
    weights.only("view_as_float", False)
    bits = weights.integer("nbits")
    if bits not in _BITS:
        raise weights.unsupported("nbits", f"one of {', '.join(map(str, _BITS))}")
    axis = weights.integer("axis", 1, low=0, high=1)
    return Encoding("hqq", {"bits": bits, "group_size": weights.integer("group_size"), "axis": axis})


_STORAGES = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
"""Names in `quire.layers.quantized.bitsandbytes.STORAGES`, repeated without torch."""


def read_bitsandbytes(config: JsonObject) -> CheckpointQuantization:
    """Read the config. LLM.int8() keeps outliers of activations apart; all weights are integers."""
    if config.flag("load_in_4bit", False):
        kind = config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        nested = config.flag("bnb_4bit_use_double_quant", False)
        storage = config.choice("bnb_4bit_quant_storage", _STORAGES, "uint8")
        encoding = Encoding("bnb_4bit", {"kind": kind, "nested": nested, "storage": storage})
    elif config.flag("load_in_8bit", False):
        encoding = Encoding("bnb_int8")
    else:
        raise config.wrong("load_in_4bit", "true, or load_in_8bit")
    left = skipping(config, "llm_int8_skip_modules")
    return CheckpointQuantization("bitsandbytes", (*left, *all_but_head(encoding)), (r"\.weight_format$",))


_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_INT4 = "Int4WeightOnlyConfig"
_PACKINGS = {"PLAIN": "torchao_int4", "TILE_PACKED_TO_4D": "torchao_int4_tiles"}
_BY_NAMES = ("FqnToConfig", "ModuleFqnToConfig")
_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")


def read_torchao(config: JsonObject) -> CheckpointQuantization:
    """Read the config; class names say whether activations are rounded, with scales computed from them."""
    kind = config.child("quant_type").child("default")
    left = skipping(config, "modules_to_not_convert")
    rules = _by_names(kind) if kind.get("_type") in _BY_NAMES else all_but_head(_encoding(kind))
    return CheckpointQuantization("torchao", (*left, *rules), (r"\._weight_act_quant_(scale|zero_point)$",))


def _by_names(kind: JsonObject) -> list[EncodingRule]:
    """Return rules by names of modules or weights, or, after "re:", by patterns of whole names; null: floats.

    Full names take precedence, then the first pattern, then "_default".
    """
    fields = kind.child("_data")
    found = fields.child("fqn_to_config" if fields.get("fqn_to_config") else "module_fqn_to_config")
    spelt, patterns, default = [], [], []
    for key in found.values:
        encoding = _encoding(found.child(key)) if key in found else None
        if key == "_default":
            default = [EncodingRule(HEAD, None), EncodingRule(EVERYTHING, encoding)]
        elif key.startswith("re:"):
            pattern = key.removeprefix("re:").removesuffix(r"\.weight").removesuffix(".weight")
            patterns.append(EncodingRule(whole(found, key, pattern), encoding))
        else:
            spelt.append(EncodingRule(re.escape(key.removesuffix(".weight")), encoding))
    return [*spelt, *patterns, *default]


def _encoding(kind: JsonObject) -> Encoding:
    name, fields = kind.choice("_type", (*_INT8, *_FP8, *_INTX, _INT4)), kind.child("_data")
    if name == _INT4:
        return _int4(kind, fields)
    options = _intx(fields) if name in _INTX else _by_row(fields, floats=name in _FP8)
    return Encoding("torchao", options, _activations(name, fields) if "Dynamic" in name else None)


def _int4(kind: JsonObject, fields: JsonObject) -> Encoding:
    """Return the encoding; files in safetensors have none of the tensors from before version 2."""
    kind.only("_version", 2)
    packing = fields.child("int4_packing_format")
    form = packing.choice("_data", tuple(_PACKINGS), "PLAIN")
    if form != "PLAIN":
        fields.only("int4_tile_packed_ntile", 8)  # 16: another order, of AMD's
    return Encoding(_PACKINGS[form], {"group_size": fields.integer("group_size", 128)})


def _activations(name: str, fields: JsonObject) -> Activations:
    """Return the activations of a class whose name says that scales are dynamic."""
    if name in _FP8:
        if (
            _granularity(fields, first=True, default="PerTensor") == "PerTensor"
            or "activation_value_lb" in fields
        ):
            return Activations(unlike="a scale for all tokens of a step")
        return Activations("e4m3", bound=fields.optional_number("activation_value_ub"))
    if name in _INT8 and (
        fields.flag("reduce_range", False) or _granularity(fields, first=True) == "PerTensor"
    ):
        return Activations(unlike="a scale for all tokens of a step, or fewer integers")
    mapping = fields.child("act_mapping_type").get("_data")
    default = "ASYMMETRIC" if name in _INTX else "SYMMETRIC"
    return Activations(symmetric=(mapping or default) == "SYMMETRIC")


def _by_row(fields: JsonObject, *, floats: bool) -> dict[str, Option]:
    group = fields.integer("group_size", 0)
    return {"floats": floats, "grid_outputs": _grid_outputs(fields), "grid_inputs": group}


def _grid_outputs(fields: JsonObject) -> int:
    return int(_granularity(fields, first=False) == "PerRow")


def _granularity(fields: JsonObject, *, first: bool, default: str = "PerRow") -> str:
    """Return the granularity of activations, which is the first of two, or of weights."""
    said = fields.get("granularity")
    one = {"granularity": said[0 if first else -1]} if isinstance(said, list) and said else {}
    granularity = fields.with_values(**one).child("granularity")
    return granularity.choice("_type", ("PerRow", "PerTensor"), default)


def _intx(fields: JsonObject) -> dict[str, Option]:
    granularity = fields.child("granularity" if "granularity" in fields else "weight_granularity")
    kind = granularity.choice("_type", ("PerGroup", "PerAxis"))
    group = granularity.child("_data").integer("group_size") if kind == "PerGroup" else 0
    return {"floats": False, "grid_outputs": 1, "grid_inputs": group}
