# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint's shape with linear layers in 4 bits and groups of 128, as GPTQ or AWQ files have them.

For speed alone, so integers are random; what is no linear layer stays what it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
_SCALE = 0.004
"""Of weights that deviate by 0.02."""
_EIGHTS, _SEVENS = -0x77777778, 0x77777777
"""Words of zero points 8; GPTQ's are less by one."""


def _words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int64).int()


def gptq(outputs: int, inputs: int) -> dict[str, Tensor]:
    """Words hold the integers of eight inputs; zero points of eight outputs."""
    groups = inputs // GROUP
    return {
        "qweight": _words(inputs // 8, outputs),
        "qzeros": torch.full((groups, outputs // 8), _SEVENS, dtype=torch.int32),
        "scales": torch.full((groups, outputs), _SCALE, dtype=torch.float16),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def awq(outputs: int, inputs: int) -> dict[str, Tensor]:
    """Words hold those of eight outputs."""
    groups = inputs // GROUP
    return {
        "qweight": _words(inputs, outputs // 8),
        "qzeros": torch.full((groups, outputs // 8), _EIGHTS, dtype=torch.int32),
        "scales": torch.full((groups, outputs), _SCALE, dtype=torch.float16),
    }


_METHODS: Mapping[str, tuple[Callable[[int, int], dict[str, Tensor]], Mapping[str, Any]]] = {
    "gptq": (gptq, {"desc_act": False, "sym": True}),
    "awq": (awq, {"zero_point": True, "version": "gemm"}),
}
METHODS = tuple(_METHODS)


def write(checkpoint: Path, directory: Path, method: str) -> None:
    """The same model, with the tensors last, so that a directory that has them is complete."""
    torch.manual_seed(0)
    make, says = _METHODS[method]
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{key}": tensor for key, tensor in make(outputs, inputs).items()}
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP} | dict(says)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, directory / "model.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
