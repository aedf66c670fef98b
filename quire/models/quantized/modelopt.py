# SPDX-License-Identifier: Apache-2.0
"""NVIDIA ModelOpt's config, in a file of its own or in config.json."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import translate

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, EncodingRule
from quire.models.json_object import JsonObject
from quire.models.quantized.fp8 import STACKS, UNREAD
from quire.models.quantized.rules import all_but_head, cache_scales, names, notes

_ENCODINGS = {
    "FP8": Encoding("fp8", {"grid_outputs": 0}, Activations("e4m3", static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": Encoding("fp8", {"grid_outputs": 1}, Activations("e4m3")),
    "NVFP4": Encoding(
        "nvfp4",
        {"packed": "weight", "scale_of_all": "weight_scale_2", "divides": False},
        Activations(unlike="4 bits"),
    ),
}


def read_modelopt(config: JsonObject) -> CheckpointQuantization:
    """Read the config; it names float modules with wildcards, or by the beginning of their names."""
    said = notes(config, "kv_cache_quant_algo", "kv_cache_scheme")
    if "quant_algo" not in config and said:  # keys and values alone
        return CheckpointQuantization("modelopt", (), UNREAD, cache_scales(config), said)
    algorithm = config.choice("quant_algo", tuple(_ENCODINGS))
    if algorithm == "NVFP4" and config.integer("group_size", 16) != 16:
        raise config.unsupported("group_size", "16")
    left = [
        EncodingRule(pattern, None)
        for name in names(config, "exclude_modules", "ignore")
        for pattern in (translate(name), translate(f"{name}.*"))
    ]
    encoding = _ENCODINGS[algorithm]
    turned = replace(encoding, options={**encoding.options, "transposed": True})
    rules = (*left, EncodingRule(STACKS, turned), *all_but_head(encoding))
    return CheckpointQuantization("modelopt", rules, UNREAD, cache_scales(config), said)
