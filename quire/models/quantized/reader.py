"""Finds what a checkpoint says of its quantisation, and has it read by whoever knows the method.

Invariant: torch-free, and the only place that knows methods by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.encoding import CheckpointQuantization
from quire.errors import UnsupportedModelError
from quire.plugins import FACTORY, PluginTable

if TYPE_CHECKING:
    from quire.models.json_object import JsonObject

    MethodReader = Callable[[JsonObject], CheckpointQuantization]

_HERE = "quire.models.quantized"

METHODS: PluginTable[MethodReader] = PluginTable(
    "quire.checkpoint_methods",
    "a checkpoint's quant_method",
    {
        "gptq": f"{_HERE}.gptq:read_gptq",
        "mxfp4": f"{_HERE}.mxfp4:read_mxfp4",
    },
    FACTORY,
)
"""By `quant_method`."""


def read_quantization(config: JsonObject, model_dir: Path) -> CheckpointQuantization | None:
    """What config.json, or a file beside it, says of the matrices; None: they are floats.

    Raises:
        ModelLoadError: it is malformed.
        UnsupportedModelError: nobody knows the method, or it asks for something that quire does not do.
    """
    found = _found(config, model_dir)
    if found is None:
        return None
    method = found.text("quant_method")
    if method not in METHODS.names():
        raise UnsupportedModelError(
            f"{found.where}: quant_method = {method!r} is not supported; known are {', '.join(METHODS.names())}"
        )
    return METHODS.resolve(method)(found)


def _found(config: JsonObject, model_dir: Path) -> JsonObject | None:
    return config.child("quantization_config") if "quantization_config" in config else None
