# SPDX-License-Identifier: Apache-2.0
"""Reader of a checkpoint's quantization config, by a table of methods, and of the form that its experts are stored in.

Invariant: torch-free, and the only place with the names of methods. Of the files only names are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.arch import ExpertsArch, ExpertStack, ModelArch
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
        "bitsandbytes": f"{_HERE}.libraries:read_bitsandbytes",
        "hqq": f"{_HERE}.libraries:read_hqq",
        "torchao": f"{_HERE}.libraries:read_torchao",
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


_ONE_OF_MANY = re.compile(r"\.experts\.\d+\.")
_IN_A_STACK = re.compile(r"\.experts\.gate_up_proj$")
"""Form that transformers computes with, and stores on demand."""
_OF_A_LIST = re.compile(r"\.experts\.\w+_projs\.\d+\.")
_FULL_NAME = re.compile(r"\.experts\.\w+_proj_weight_\w+$")


def as_stored(arch: ModelArch, names: Sequence[str]) -> ModelArch:
    """Return the model with its experts in stacks or one by one, as tensors of these names have them."""
    experts = arch.experts
    if experts is None:
        return arch
    if experts.stack is None:
        if not any(_IN_A_STACK.search(name) for name in names):
            return arch
        return replace(arch, experts=replace(experts, stack=ExpertStack(gate_up="gate_up_proj", weight="")))
    if any(_ONE_OF_MANY.search(name) for name in names):
        return replace(arch, experts=replace(experts, stack=None))
    if experts.alternates and any(_OF_A_LIST.search(name) for name in names):
        return _in_lists(arch, experts, names)
    full_names = any(_FULL_NAME.search(name) for name in names)
    return replace(arch, experts=replace(experts, stack=replace(experts.stack, full_names=full_names)))


def _in_lists(arch: ModelArch, experts: ExpertsArch, names: Iterable[str]) -> ModelArch:
    """Return the model with Unsloth's lists of experts and linear routers; adapters use transformers' names."""
    called, router = arch.names, arch.names.renamed.get("gate", "gate")
    if any(f".{router}.linear.weight" in name for name in names):
        renamed = {**called.renamed, "gate": f"{router}.linear"}
        called = replace(called, renamed=renamed, adapters=called.adapters or called)
    return replace(arch, names=called, experts=replace(experts, stack=None, listed=True))
