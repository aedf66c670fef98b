# SPDX-License-Identifier: Apache-2.0
"""llama.cpp, as llama-cpp-python's source distribution carries it: built here, measured with its own tools."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.compare import processes
from benchmarks.compare.cases import CASES, MAX_NUM_SEQS, NUM_THREADS, Case, Phase, cases_named
from benchmarks.compare.engines.base import SET_UP_LIMIT_S, Rate, Task
from benchmarks.compare.engines.environment import Environment
from benchmarks.compare.isa import Isa

VERSION = "0.3.36"
_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-lookup", "llama-perplexity")
_PACKAGES = ("gguf", "diskcache", "jinja2", "typing_extensions")
"""To write files, and what llama-cpp-python's binding imports."""
_CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_CCACHE=OFF", "-DLLAMA_OPENSSL=OFF"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "SERVER", "APP")),
)
_NATIVE = "-DGGML_NATIVE=ON"
_BUILD_JOBS = 2
NOT_PURE = "Q4_0, not pure"
"""Q4_0 files as people download them: the output head is in eight bits, or in six."""
_MIXES = ("Q4_K_M", NOT_PURE)
"""Files of several types: most tensors in four bits, those that matter more in six or eight."""
_CONTEXT = 256
"""Positions of a sequence: the least that llama.cpp rounds to, and enough for every case of many requests."""


class LlamaCpp:
    """One build per instruction set; one GGUF file per checkpoint and precision."""

    name = "llama.cpp"
    precisions: ClassVar[Mapping[str, int]] = {"BF16": 16, "Q8_0": 8, "Q4_0": 4, "Q4_K_M": 4}
    cases: ClassVar[Sequence[str]] = tuple(CASES)
    notes = (
        f"vendored in llama-cpp-python {VERSION}, cmake {' '.join(_CMAKE)}; prefill and B=1 by llama-bench (from an "
        "empty context, without sampling), the others by llama-batched-bench (without sampling); quantized by "
        "`llama-quantize --pure`, so the head is in the same format as everything else, but for Q4_K_M; KV cache f16, "
        "as by default."
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = Environment(folder / "venv")
        self._isa: Isa | None = None
        self._models = folder

    def set_up(self, isa: Isa) -> None:
        if not self._environment.complete:
            self._environment.create()
            self._environment.install(_PACKAGES)
            self._environment.finish()
        self._build(isa)
        self._isa = isa

    def prepare(self, checkpoint: Path, precision: str) -> None:
        self._models = self._folder / checkpoint.name
        self._models.mkdir(parents=True, exist_ok=True)
        full = self.model("BF16")
        if not full.exists():
            self.convert(checkpoint, full)
        if not self.model(precision).exists():
            self.quantize(full, self.model(precision), precision)

    def convert(self, checkpoint: Path, target: Path, *options: str) -> None:
        """Write a checkpoint as a file; `options` are those of `workers.gguf_file`."""
        unfinished = target.with_suffix(".unfinished")
        worker = "benchmarks.compare.workers.gguf_file"
        command = [self._environment.python, "-m", worker, checkpoint, unfinished, *options]
        processes.run(command, SET_UP_LIMIT_S)
        unfinished.rename(target)

    def measure(self, task: Task) -> Iterator[Rate]:
        together = [case for case in cases_named(task.cases) if case.num_requests > 1]
        alone = [case for case in cases_named(task.cases) if case.num_requests == 1]
        for cases, command, parse in (
            (alone, self._bench(alone, task), bench_rates),
            (together, self._batched_bench(together, task), batched_bench_rates),
        ):
            if cases:
                yield from parse(processes.lines(command, task.limit_s, task.isa.environment), cases)

    def ask(self, task: Path, answer: Path, limit_s: float) -> None:
        """Have `workers.llama_cpp_answers` do a task, with the binding that comes with the sources.

        Raises:
            ProgramError: llama.cpp does not load the file, or does not answer.
        """
        settings = {
            "PYTHONPATH": str(self._source()),
            "LLAMA_CPP_LIB_PATH": str(self.tool("llama-bench").parent),
        }
        worker = "benchmarks.compare.workers.llama_cpp_answers"
        processes.run([self._environment.python, "-m", worker, task, answer], limit_s, settings)

    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python (source)": VERSION}

    def _build(self, isa: Isa) -> None:
        build = self._folder / f"build-{isa.name}"
        stamp, processor = build / "processor", instructions() if _NATIVE in isa.cmake_options else ""
        if build.exists() and (stamp.read_text() if stamp.exists() else "") != processor:
            # What another processor has built for itself may hold instructions that this one lacks.
            shutil.rmtree(build)
        if all((build / "bin" / tool).exists() for tool in _TOOLS):
            return
        source = self._source() / "vendor" / "llama.cpp"
        processes.run(["cmake", "-S", source, "-B", build, *_CMAKE, *isa.cmake_options], SET_UP_LIMIT_S)
        stamp.write_text(processor)
        jobs = ["--parallel", str(_BUILD_JOBS)]
        processes.run(["cmake", "--build", build, *jobs, "--target", *_TOOLS], SET_UP_LIMIT_S)

    def _source(self) -> Path:
        """The unpacked source distribution."""
        unpacked = self._folder / f"llama_cpp_python-{VERSION}"
        if not (unpacked / "PKG-INFO").exists():
            self._environment.download_source(f"llama-cpp-python=={VERSION}", self._folder)
            with tarfile.open(f"{unpacked}.tar.gz") as archive:
                archive.extractall(self._folder, filter="data")
        return unpacked

    def quantize(self, full: Path, target: Path, precision: str) -> None:
        """Write a file's weights in a type; a file that is quantized already gives the numbers it stands for."""
        unfinished = target.with_suffix(".unfinished")
        quantize = self.tool("llama-quantize")
        options = ["--allow-requantize", *([] if precision in _MIXES else ["--pure"])]
        kind = precision.partition(",")[0]
        processes.run([quantize, *options, full, unfinished, kind, str(NUM_THREADS)], SET_UP_LIMIT_S)
        unfinished.rename(target)

    def _bench(self, cases: Iterable[Case], task: Task) -> list[str | Path]:
        lengths = {Phase.PREFILL: 0, Phase.DECODE: 0} | {case.phase: case.num_tokens for case in cases}
        prompt, output = str(lengths[Phase.PREFILL]), str(lengths[Phase.DECODE])
        options = ["-p", prompt, "-n", output, "-r", "1", "-t", str(NUM_THREADS), "-o", "json"]
        return [self.tool("llama-bench"), "-m", self.model(task.precision), *options]

    def _batched_bench(self, cases: Iterable[Case], task: Task) -> list[str | Path]:
        prompts = ",".join(str(case.input_len) for case in cases)
        steps = ",".join({str(case.output_len - 1) for case in cases})
        sizes = [
            "-npp",
            prompts,
            "-ntg",
            steps,
            "-npl",
            str(MAX_NUM_SEQS),
            "-c",
            str(_CONTEXT * MAX_NUM_SEQS),
        ]
        options = ["-t", str(NUM_THREADS), "--output-format", "jsonl"]
        return [self.tool("llama-batched-bench"), "-m", self.model(task.precision), *sizes, *options]

    def tool(self, name: str) -> Path:
        """One of its programs."""
        assert self._isa is not None, "set_up comes first"
        return self._folder / f"build-{self._isa.name}" / "bin" / name

    def model(self, precision: str) -> Path:
        """The file of a precision."""
        return self._models / f"{precision}.gguf"


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's feature flags, sorted, or an empty text if they are unknown."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return " ".join(sorted(flags.split()))


def bench_rates(lines: Iterable[str], cases: Iterable[Case]) -> Iterator[Rate]:
    """Read the output of `llama-bench -o json`: a test has prompt tokens or generated tokens, never both."""
    tests = json.loads("".join(lines))
    for case in cases:
        length = "n_prompt" if case.phase is Phase.PREFILL else "n_gen"
        (test,) = (test for test in tests if test[length] == case.num_tokens)
        yield Rate(case.name, test["avg_ts"])


def batched_bench_rates(lines: Iterable[str], cases: Iterable[Case]) -> Iterator[Rate]:
    """Read the output of `llama-batched-bench --output-format jsonl`, and skip its other lines.

    Its steps come after the prompt, whose last position gives each request's first token.
    """
    tests = [json.loads(line) for line in lines if line.startswith("{")]
    for case in cases:
        sizes = (case.num_requests, case.input_len, case.output_len - 1)
        (test,) = (test for test in tests if (test["pl"], test["pp"], test["tg"]) == sizes)
        seconds = test["t_tg"] if case.phase is Phase.DECODE else test["t"]
        yield Rate(case.name, case.num_tokens / seconds)
