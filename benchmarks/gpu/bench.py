"""`python -m benchmarks.gpu.bench`: how fast is quire on this GPU, beside what the GPU could do at best?

Random weights in the shapes of an 8B Llama and a 0.5B Qwen, limits from the bandwidth and arithmetic measured in the
same run. A run takes under 8 minutes on one H100 and writes benchmarks/results/<date>-gpu-bench.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import imports
from benchmarks.gpu.rows import TITLES, Row

PACKAGES = (*imports.ENGINE, "safetensors")


@dataclass(frozen=True)
class Measurement:
    """A group of rows from one engine."""

    name: str
    run: Callable[[], Iterator[Row]]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bench", description=__doc__)
    found.add_argument("--device", default="cuda", choices=("cuda", "xpu", "cpu"))
    found.add_argument("--tiny", action="store_true", help="Small shapes: a dry run, which a CPU can do.")
    found.add_argument("--only", nargs="+", help="Names of measurements, as they are printed.")
    found.add_argument(
        "--limit", type=float, default=420.0, help="Seconds after which no measurement begins."
    )
    found.add_argument("--out", type=Path, help="The page of results.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 1 if something could not be measured, not if it is slow."""
    args = parser().parse_args(arguments)
    absent = imports.missing(PACKAGES)
    if absent:
        print(imports.advice(absent), file=sys.stderr)
        return 2
    from benchmarks.gpu import page
    from benchmarks.gpu.limits import measure_limits
    from benchmarks.gpu.measurements import Bench, measurements
    from benchmarks.gpu.target import make_target, today

    target = make_target(args.device, args.tiny)
    limits = measure_limits(target)
    facts = [
        target.description() + ".",
        f"Measured: {limits.bytes_per_s / 1e12:.2f} TB/s in a copy, {limits.flops_per_s / 1e12:.0f} TFLOP/s in bf16.",
    ]
    print("\n".join(facts), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(target, limits, Path(scratch))
        rows, troubles = run(select(measurements(bench), args.only), args.limit)
    path = args.out or page.RESULTS / f"{today()}-gpu-bench.md"
    failed = [f"Not measured: {name}." for name in troubles]
    page.write(
        path, f"GPU benchmark, {today()}", facts + failed, page.table(TITLES, [row.cells() for row in rows])
    )
    return 1 if troubles else 0


def select(found: Sequence[Measurement], names: Sequence[str] | None) -> list[Measurement]:
    """Those of these names, or all; ends the process if there is none of a name."""
    known = [measurement.name for measurement in found]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        sys.exit(f"no measurement {unknown[0]!r}; there are {', '.join(map(repr, known))}")
    return [measurement for measurement in found if not names or measurement.name in names]


def run(
    found: Sequence[Measurement], limit_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Row], list[str]]:
    """Rows, printed as they come, and the names of what could not be measured; one that fails costs itself alone."""
    started = clock()
    rows: list[Row] = []
    troubles = []
    for measurement in found:
        if clock() - started >= limit_s:
            troubles.append(f"{measurement.name} (no time left of {limit_s:g} s)")
            continue
        begun = clock()
        try:
            for row in measurement.run():
                print(row.line(), flush=True)
                rows.append(row)
        except Exception as error:  # the other measurements are to run
            traceback.print_exc()
            troubles.append(f"{measurement.name} ({type(error).__name__}: {error})")
        print(f"-- {measurement.name}: {clock() - begun:.1f} s", flush=True)
    return rows, troubles


if __name__ == "__main__":
    sys.exit(main())
