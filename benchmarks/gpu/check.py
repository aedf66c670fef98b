"""`python -m benchmarks.gpu.check`: is everything right on this GPU? One line per check, exit code 1 if one failed.

Every Triton kernel is compiled and compared with its oracle, whole models with transformers, engines with each other. A
run takes under 8 minutes on one H100 and writes benchmarks/results/<date>-gpu-check.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu import imports
from benchmarks.gpu.runner import Check

if TYPE_CHECKING:
    from benchmarks.gpu.runner import Outcome
    from benchmarks.gpu.target import Target

GROUPS = {
    "engine": imports.ENGINE,
    "kernels": imports.KERNELS,
    "models": imports.MODELS,
    "cases": imports.KERNELS,
}
"""Group of checks -> the packages that it needs; first what nothing but a device can show."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    found.add_argument("--device", default="cuda", choices=("cuda", "xpu", "cpu"))
    found.add_argument("--tiny", action="store_true", help="Small shapes: a dry run, which a CPU can do.")
    found.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    found.add_argument("--limit", type=float, default=450.0, help="Seconds after which no check begins.")
    found.add_argument("--out", type=Path, help="The page of results.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    args = parser().parse_args(arguments)
    absent = imports.missing(sorted({package for group in args.only for package in GROUPS[group]}))
    if absent:
        print(imports.advice(absent), file=sys.stderr)
        return 2
    if args.device == "cpu":
        from tests.kernels import triton_interpreter

        triton_interpreter.start()
    from benchmarks.gpu import page, runner
    from benchmarks.gpu.target import make_target, today

    target = make_target(args.device, args.tiny)
    print(target.description(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = runner.run_checks(_checks(target, args.only, Path(scratch)), args.limit)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed in {_seconds(outcomes):.0f} s."
    for outcome in failed:
        print(f"\n{outcome.verdict}: {outcome.check.name}\n{outcome.trouble}", file=sys.stderr)
    print(summary)
    rows = [outcome.cells() for outcome in outcomes]
    lines = page.table(("verdict", "check", "error", "allowed", "s"), rows)
    path = args.out or page.RESULTS / f"{today()}-gpu-check.md"
    page.write(path, f"GPU check, {today()}", [target.description() + ".", summary], lines)
    return 1 if failed else 0


def _checks(target: Target, groups: Sequence[str], scratch: Path) -> Iterator[Check]:
    for group in groups:
        try:
            yield from _CHECKS[group](target, scratch)
        except Exception as error:  # the other groups are to run
            yield Check(f"{group}: could not begin", partial(_fail, error))


def _fail(error: Exception) -> float:
    raise error


def _kernels(target: Target, _scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import attention_checks, kernel_checks, linear_checks, sampling_checks

    for module in (kernel_checks, attention_checks, linear_checks, sampling_checks):
        yield from module.checks(target)


def _models(target: Target, scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import model_checks

    return model_checks.checks(target, scratch)


def _engine(target: Target, scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import engine_checks

    return engine_checks.checks(target, scratch)


def _cases(target: Target, _scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import kernel_checks

    return kernel_checks.small_cases(target)


_CHECKS: dict[str, Callable[[Target, Path], Iterator[Check]]] = {
    "kernels": _kernels,
    "models": _models,
    "engine": _engine,
    "cases": _cases,
}


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.seconds for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
