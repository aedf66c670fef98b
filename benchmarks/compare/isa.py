# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that a comparison can be held to.

Invariant: an instruction set means the same for every engine; where an engine cannot be held to it, its file says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.compare.cases import NUM_THREADS


@dataclass(frozen=True)
class Isa:
    """Environment of every engine, and how llama.cpp, which chooses when it is compiled, is built."""

    name: str
    title: str
    environment: Mapping[str, str]
    cmake_options: tuple[str, ...]


_THREADS = {"OMP_NUM_THREADS": str(NUM_THREADS)}
_AVX2_ONLY = {
    "QUIRE_CPU_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}

ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa(
            "avx2",
            "AVX2, FMA and F16C only",
            _THREADS | _AVX2_ONLY,
            (
                "-DGGML_NATIVE=OFF",
                *(f"-DGGML_{feature}=ON" for feature in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")),
                *(f"-DGGML_{feature}=OFF" for feature in ("AVX512", "AVX_VNNI")),
            ),
        ),
        Isa("native", "everything that this CPU has", _THREADS, ("-DGGML_NATIVE=ON",)),
    )
}
