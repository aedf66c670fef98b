# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI, with the converter of optimum-intel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.compare import processes
from benchmarks.compare.engines.base import SET_UP_LIMIT_S
from benchmarks.compare.engines.environment import TORCH, Environment
from benchmarks.compare.engines.python_engine import PythonEngine
from benchmarks.compare.isa import ISAS, Isa


class OpenVino(PythonEngine):
    """Models are converted once per weight format."""

    name = "OpenVINO"
    worker = "openvino"
    precisions: ClassVar[Mapping[str, int]] = {"fp16": 16, "int8": 8, "int4": 4}
    packages = ("openvino", "openvino-genai", "optimum-intel", "nncf")
    notes = (
        "`ContinuousBatchingPipeline`, hint LATENCY; `optimum-cli export openvino --weight-format`, int4 with "
        "`--ratio 1.0 --group-size 128 --all-layers` (asymmetric, head included; its default leaves the head in "
        "int8). Never held to an instruction set: on a CPU with AVX-512 it picks layouts that a oneDNN held to AVX2 "
        "refuses, so it always has all that the CPU has."
    )
    _INT4 = ("--ratio", "1.0", "--group-size", "128", "--all-layers")

    def prepare(self, checkpoint: Path, precision: str) -> None:
        target = self._model(precision)
        if target.exists():
            return
        unfinished = target.with_suffix(".unfinished")
        export = (self._environment.script("optimum-cli"), "export", "openvino", "--model", checkpoint)
        options = ("--task", "text-generation-with-past", "--weight-format", precision)
        quantized = self._INT4 if precision == "int4" else ()
        processes.run([*export, *options, *quantized, unfinished], SET_UP_LIMIT_S)
        unfinished.rename(target)

    def _install(self, environment: Environment) -> None:
        environment.install([TORCH])
        environment.install([TORCH, "openvino-genai", "optimum-intel"])
        # Its only build asks for CUDA libraries, without which transformers fails on it; text needs none of it.
        environment.uninstall("torchvision")

    def _settings(self, isa: Isa) -> Mapping[str, str]:
        return ISAS["native"].environment

    def _model(self, precision: str) -> Path:
        return self._folder / "models" / precision
