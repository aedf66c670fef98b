# SPDX-License-Identifier: Apache-2.0
"""AWQ's config, as AutoAWQ and transformers write it."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding
from quire.models.json_object import JsonObject
from quire.models.quantized.gptq import group_size
from quire.models.quantized.rules import all_but_head, skipping


def read_awq(config: JsonObject) -> CheckpointQuantization:
    """Read the config; AutoAWQ's own files have shorter keys."""
    old = {"bits": "w_bit", "group_size": "q_group_size"}
    config = config.with_aliases(
        {new: key for new, key in old.items() if key in config and new not in config}
    )
    if config.integer("bits") != 4:
        raise config.unsupported("bits", "4")
    layout = "format" if "format" in config else "version"  # GPTQModel's name, and AutoAWQ's
    if config.text(layout, "gemm").lower() != "gemm":
        raise config.unsupported(layout, "gemm")
    encoding = Encoding(
        "awq",
        {
            "group_size": group_size(config, "group_size"),
            "zero_points": config.flag("zero_point", True),
        },
    )
    rules = skipping(config, "modules_to_not_convert")
    return CheckpointQuantization("awq", (*rules, *all_but_head(encoding)))
