# SPDX-License-Identifier: Apache-2.0
"""Configs of checkpoints in floats of 8 and 4 bits: E4M3 with scales per weight, per output (FBGEMM) or per block
(DeepSeek); NVIDIA ModelOpt's, in a file of its own or in config.json; and OpenAI's MXFP4, of experts only.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import translate

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, EncodingRule, Option
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import all_but_head, block_shape, cache_scales, names, notes, skipping

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


def read_mxfp4(config: JsonObject) -> CheckpointQuantization:
    """Read the config; `modules_to_not_convert` names no experts, so it is not read."""
    return CheckpointQuantization("mxfp4", (EncodingRule(r".*\.experts\..*", Encoding("mxfp4_blocks")),))


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
