# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' config, as transformers writes it."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import all_but_head, skipping

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
