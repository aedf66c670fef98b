# SPDX-License-Identifier: Apache-2.0
"""Configs of checkpoints in E4M3, with scales per weight, per output (FBGEMM) or per block (DeepSeek)."""

from __future__ import annotations

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, EncodingRule, Option
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import all_but_head, block_shape, cache_scales, notes, skipping

STACKS = r".*\.experts\.(gate_up|down)_proj"
"""Parameters with the weights [K, N] of all of a layer's experts, as in Llama 4."""
UNREAD = (
    # Activations are rounded, if at all, with scales computed from them.
    r"(\.|\.experts\.(gate_up|down)_proj_)(input_scale|input_scale_ub|activation_scale)$",
    r"\.(k|v|q|kv|prob)_scale$",
    r"\.[kv]_proj\.(k|v|output)_scale$",
)
"""Scales of activations, and of keys and values, which no weight has."""


def read_fp8(config: JsonObject) -> CheckpointQuantization:
    """Read a config of weights with a scale for each block of `weight_block_size`, else one for the whole weight."""
    static = config.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if "weight_block_size" in config:
        rows, columns = block_shape(config, "weight_block_size")
        options: dict[str, Option] = {
            "grid_outputs": rows,
            "grid_inputs": columns,
            "scale": "weight_scale_inv",
        }
        encoding = Encoding("fp8", options, Activations("e4m3", 0 if static else columns, static))
    else:
        encoding = Encoding("fp8", {"grid_outputs": 0}, Activations("e4m3", static=static))
    return _quantization("fp8", config, encoding)


def read_fbgemm_fp8(config: JsonObject) -> CheckpointQuantization:
    """Read a config of weights with a scale per output; stacks of experts, as in Llama 4, are transposed."""
    by_output, bound = {"grid_outputs": 1}, config.number("activation_scale_ub", 1200.0)
    rounded = Activations("e4m3", bound=bound)
    stacks = EncodingRule(STACKS, Encoding("fp8", by_output | {"transposed": True}, rounded))
    return _quantization("fbgemm_fp8", config, Encoding("fp8", by_output, rounded), stacks)


def _quantization(
    method: str, config: JsonObject, encoding: Encoding, *before: EncodingRule
) -> CheckpointQuantization:
    left = skipping(config, "modules_to_not_convert", "ignored_layers")
    otherwise = notes(config, "activation_scheme", "kv_cache_scheme")
    rules = (*left, *before, *all_but_head(encoding))
    return CheckpointQuantization(method, rules, UNREAD, cache_scales(config), otherwise)
