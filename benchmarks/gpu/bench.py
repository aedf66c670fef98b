# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.bench`: how fast is quire on this GPU, beside what the GPU could do at best?

Random weights in the shapes of an 8B Llama and a 0.5B Qwen, limits from the bandwidth and arithmetic measured in the
same run. A run takes under 8 minutes on one H100 and writes benchmarks/results/<date>-gpu-bench.md.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu import imports, page
from benchmarks.gpu.journal import LOST, Clock, Fact, Journal, supervise
from benchmarks.gpu.rows import TITLES, Row

PACKAGES = (*imports.ENGINE, "safetensors")


@dataclass(frozen=True)
class Measurement:
    """A group of rows from one engine."""

    name: str
    run: Callable[[], Iterator[Row]]

    def facts(self) -> Iterator[Fact]:
        """Its rows as the journal keeps them, printed as they come."""
        for row in self.run():
            print(row.line(), flush=True)
            yield asdict(row)


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
    found.add_argument(
        "--journal", type=Path, help=argparse.SUPPRESS
    )  # given to the process that does the work
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 1 if something could not be measured, not if it is slow."""
    args = parser().parse_args(arguments)
    absent = imports.missing(PACKAGES)
    if absent:
        print(imports.advice(absent), file=sys.stderr)
        return 2
    if args.journal is not None:
        return _work(args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        given = sys.argv[1:] if arguments is None else arguments
        code = supervise([sys.executable, "-m", "benchmarks.gpu.bench", *given], path, args.limit)
        journal = Journal(path)
    return _report(journal, args.out) if journal.entries else code


def _work(args: argparse.Namespace) -> int:
    """Measure what the journal does not know yet."""
    faulthandler.enable()
    from benchmarks.gpu.limits import measure_limits
    from benchmarks.gpu.measurements import Bench, measurements
    from benchmarks.gpu.target import make_target

    target, journal = make_target(args.device, args.tiny), Journal(args.journal)
    limits = measure_limits(target)
    rates = f"{limits.bytes_per_s / 1e12:.2f} TB/s in a copy, {limits.flops_per_s / 1e12:.0f} TFLOP/s in bf16"
    for fact in (target.description() + ".", f"Measured: {rates}."):
        print(fact, flush=True)
        journal.note(fact)
    with tempfile.TemporaryDirectory() as scratch:
        wanted = select(measurements(Bench(target, limits, Path(scratch))), args.only)
        return 0 if run(wanted, args.limit, journal, answers=target.answers) else LOST


def _report(journal: Journal, out: Path | None) -> int:
    """Write the page; the exit code."""
    lost = {
        name: entry.trouble.strip().splitlines()[-1]
        for name, entry in journal.entries.items()
        if entry.trouble
    }
    rows = [Row.of(fact) for entry in journal.entries.values() for fact in entry.facts]
    failed = [f"Not measured: {name} ({trouble})." for name, trouble in lost.items()]
    path = out or page.RESULTS / f"{page.today()}-gpu-bench.md"
    lines = page.table(TITLES, [row.cells() for row in rows])
    page.write(path, f"GPU benchmark, {page.today()}", journal.notes + failed, lines)
    return 1 if failed else 0


def select(found: Sequence[Measurement], names: Sequence[str] | None) -> list[Measurement]:
    """Those of these names, or all; ends the process if there is none of a name."""
    known = [measurement.name for measurement in found]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        sys.exit(f"no measurement {unknown[0]!r}; there are {', '.join(map(repr, known))}")
    return [measurement for measurement in found if not names or measurement.name in names]


def run(
    found: Sequence[Measurement],
    limit_s: float,
    journal: Journal,
    *,
    answers: Callable[[], bool] = lambda: True,
    clock: Clock = time.monotonic,
) -> bool:
    """Measure what the journal does not know; whether the device `answers` to the end."""
    started = clock()
    for measurement in found:
        if measurement.name in journal.entries:
            continue
        if clock() - started >= limit_s:
            journal.refuse(measurement.name, f"no time left of {limit_s:g} s")
            continue
        entry = journal.attempt(measurement.name, measurement.facts, clock)
        print(f"{entry.trouble}-- {measurement.name}: {entry.seconds:.1f} s", flush=True)
        if entry.trouble and not answers():
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
