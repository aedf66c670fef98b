# SPDX-License-Identifier: Apache-2.0
"""quire itself, and the probes of the machine: both from the environment that this program runs in."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.compare import processes
from benchmarks.compare.engines.base import SET_UP_LIMIT_S, Rate, Task
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.engines.python_engine import PythonEngine, rates
from benchmarks.compare.isa import Isa


class Quire(PythonEngine):
    """The tree that this file belongs to."""

    name = "quire"
    worker = "quire"
    precisions: ClassVar[Mapping[str, int]] = {
        "bf16": 16,
        "bf16, auto": 16,
        "int8": 8,
        "int4": 4,
        "int4, int4 head": 4,
    }
    packages = ("quire-llm", "torch")
    notes = (
        "`LLM(checkpoint, load_format='auto', enable_prefix_caching=False)`; bf16: `matmul_precision='highest'`; int8 "
        "and int4 by `quantization=` with its defaults: int8 and int4 in groups of 32, int4 with scales and "
        "minimums in two levels, as Q4_K, and values in int8 (4.8 bits), but the "
        "head in int8, or with `quantization_config={'head': 'int4'}` in int4, too."
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._environment.python = Path(sys.executable)

    def set_up(self, isa: Isa) -> None:
        """It is installed, or this program would not run."""


class QuireFiles(Quire):
    """The tree that this file belongs to, with files that are quantized already."""

    name = "quire, files"
    precisions: ClassVar[Mapping[str, int]] = {
        "GPTQ g128": 4,
        "AWQ g128": 4,
        "Q8_0": 8,
        "Q4_0": 4,
        "Q4_K_M": 4,
    }
    notes = (
        "GPTQ and AWQ: the same shape with random integers in groups of 128, and the head, which such files have in "
        "floats, in int8, as quire's int4 has it; GGUF: the very file that llama.cpp has."
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._llama_cpp = LlamaCpp(folder.parent / "llama.cpp")
        self._isa: Isa | None = None

    def set_up(self, isa: Isa) -> None:
        self._isa = isa

    def prepare(self, checkpoint: Path, precision: str) -> None:
        self._checkpoint = checkpoint
        path, method = self._model(precision), precision.partition(" ")[0].lower()
        if path.suffix == ".gguf":
            assert self._isa is not None, "set_up comes first"
            self._llama_cpp.set_up(self._isa)
            self._llama_cpp.prepare(checkpoint, precision)
        elif not (path / "model.safetensors").exists():
            worker = "benchmarks.compare.workers.quantized_checkpoint"
            processes.run([sys.executable, "-m", worker, checkpoint, path, method], SET_UP_LIMIT_S)

    def _model(self, precision: str) -> Path:
        if precision.startswith("Q"):
            return self._llama_cpp.model(precision)
        return self._folder / f"{self._checkpoint.name}-{precision.partition(' ')[0].lower()}"


class Machine:
    """Probe of the processor's and the memory's peak rates, measured in the same session as the engines."""

    name = "machine"
    precisions: ClassVar[Mapping[str, int]] = {"fp32": 32}
    cases: ClassVar[Sequence[str]] = ("flops", "read")
    notes = "the probes of `quire bench kernels`"

    def __init__(self, folder: Path) -> None:
        pass

    def set_up(self, isa: Isa) -> None:
        """The probes are quire's."""

    def prepare(self, checkpoint: Path, precision: str) -> None:
        """No model is needed."""

    def measure(self, task: Task) -> Iterator[Rate]:
        command = [sys.executable, "-m", "benchmarks.compare.workers.machine", *task.cases]
        yield from rates(processes.lines(command, task.limit_s, task.isa.environment))

    def versions(self) -> dict[str, str]:
        return {}


class BesideProbe(Machine):
    """quire decoding one request, as a share of what the memory gives in the same second."""

    name = "beside probe"
    precisions: ClassVar[Mapping[str, int]] = {"bf16": 16, "int8": 8, "int4": 4}
    cases: ClassVar[Sequence[str]] = ("share",)
    notes = "`quire bench kernels --tape`: steps and probes alternate in one process"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checkpoint = Path()

    def prepare(self, checkpoint: Path, precision: str) -> None:
        self._checkpoint = checkpoint

    def measure(self, task: Task) -> Iterator[Rate]:
        worker = ("-m", "benchmarks.compare.workers.beside_probe")
        command: list[str | Path] = [sys.executable, *worker, task.precision, self._checkpoint]
        yield from rates(processes.lines(command, task.limit_s, task.isa.environment))
