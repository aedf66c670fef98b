# SPDX-License-Identifier: Apache-2.0
"""HQQ's config, as transformers writes it: options for all linear layers, or for each kind by its name."""

from __future__ import annotations

import re

from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import all_but_head, skipping

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
        rules += all_but_head(_encoding(options))
    else:
        rules += [
            EncodingRule(rf".*\.{re.escape(kind)}", _encoding(options.child(kind))) for kind in options.values
        ]
    return CheckpointQuantization("hqq", tuple(rules), _UNREAD)


def _encoding(options: JsonObject) -> Encoding:
    for nested in ("scale_quant_params", "zero_quant_params"):
        options.only(nested)
    weights = options.child("weight_quant_params")
    weights.only("view_as_float", False)
    bits = weights.integer("nbits")
    if bits not in _BITS:
        raise weights.unsupported("nbits", f"one of {', '.join(map(str, _BITS))}")
    axis = weights.integer("axis", 1, low=0, high=1)
    return Encoding("hqq", {"bits": bits, "group_size": weights.integer("group_size"), "axis": axis})
