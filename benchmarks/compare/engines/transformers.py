# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers with torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from benchmarks.compare.engines.environment import TORCH, Environment
from benchmarks.compare.engines.python_engine import PythonEngine


class Transformers(PythonEngine):
    """`AutoModelForCausalLM.generate`."""

    name = "transformers"
    worker = "transformers"
    precisions: ClassVar[Mapping[str, int]] = {"bf16": 16, "fp32": 32}
    packages = ("transformers", "torch")
    notes = "`generate` with the prompts in one batch."

    def _install(self, environment: Environment) -> None:
        environment.install([TORCH, "transformers>=5,<6"])
