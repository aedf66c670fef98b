# SPDX-License-Identifier: Apache-2.0
"""Reader of a checkpoint's quantization config, by a table of methods.

Invariant: torch-free, and the only place with the names of methods.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.encoding import CheckpointQuantization
from quire.errors import UnsupportedModelError
from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, read_json_object
from quire.plugins import FACTORY, PluginTable

if TYPE_CHECKING:
    MethodReader = Callable[[JsonObject], CheckpointQuantization]

_HERE = "quire.models.quantized"

METHODS: PluginTable[MethodReader] = PluginTable(
    "quire.checkpoint_methods",
    "a checkpoint's quant_method",
    {
        "gptq": f"{_HERE}.gptq:read_gptq",
        "awq": f"{_HERE}.gptq:read_awq",
        "compressed-tensors": f"{_HERE}.compressed_tensors:read_compressed_tensors",
        "fp8": f"{_HERE}.fp8:read_fp8",
        "fbgemm_fp8": f"{_HERE}.fp8:read_fbgemm_fp8",
        "modelopt": f"{_HERE}.fp8:read_modelopt",
        "bitsandbytes": f"{_HERE}.bitsandbytes:read_bitsandbytes",
        "hqq": f"{_HERE}.hqq:read_hqq",
        "torchao": f"{_HERE}.torchao:read_torchao",
        "mxfp4": f"{_HERE}.fp8:read_mxfp4",
    },
    FACTORY,
)
"""Readers by `quant_method`, which GPTQModel calls `method`."""


_FILES = (
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", "", "gptq"),
    ("quant_config.json", "", "awq"),
)
"""Config files of tools: file name, key in the file, and method."""


def read_quantization(config: JsonObject, model_dir: Path) -> CheckpointQuantization | None:
    """Return the quantization in config.json, or in a file beside it; None if weights are floats.

    Raises:
        ModelLoadError: it is malformed.
        UnsupportedModelError: the method is unknown, or it needs something that quire does not do.
    """
    found = _found(config, model_dir)
    if found is None:
        return None
    key = "method" if "method" in found and "quant_method" not in found else "quant_method"
    if key not in found and (found.flag("load_in_4bit", False) or found.flag("load_in_8bit", False)):
        found = found.with_values(quant_method="bitsandbytes")  # early configs do not name it
    method = found.text(key)
    if method not in METHODS.names():
        raise UnsupportedModelError(
            f"{found.where}: {key} = {method!r} is not supported; known are {', '.join(METHODS.names())}"
        )
    return METHODS.resolve(method)(found)


def _found(config: JsonObject, model_dir: Path) -> JsonObject | None:
    """Return the config in config.json, or in a file that a tool writes beside it."""
    for key in ("quantization_config", "compression_config"):
        if key in config:
            return config.child(key)
    for name, inside, method in _FILES:
        if has_file(model_dir / name):
            file = read_json_object(model_dir / name)
            found = file.child(inside) if inside else file
            implied = {} if "method" in found else {"quant_method": method}
            return JsonObject(found.where, implied | found.values, refused=config.refused)
    return None
