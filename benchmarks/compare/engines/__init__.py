# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared, in the order in which they take turns. A new one is a file here and a row below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.engines.base import Engine
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.engines.openvino import OpenVino
from benchmarks.compare.engines.quire import BesideProbe, Machine, Quire, QuireFiles
from benchmarks.compare.engines.transformers import Transformers
from benchmarks.compare.engines.vllm import Vllm

_ENGINES: dict[str, Callable[[Path], Engine]] = {
    "machine": Machine,
    "quire": Quire,
    "beside probe": BesideProbe,
    "llama.cpp": LlamaCpp,
    "quire, files": QuireFiles,
    "openvino": OpenVino,
    "vllm": Vllm,
    "transformers": Transformers,
}

ENGINE_NAMES = tuple(_ENGINES)


def engines_in(folder: Path) -> dict[str, Engine]:
    """All engines, each with a folder of its own in this one."""
    return {name: kind(folder / name) for name, kind in _ENGINES.items()}
