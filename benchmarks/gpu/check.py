# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.check`: is everything right on this GPU? One line per check, exit code 1 if one failed.

Every Triton kernel is compiled and compared with its oracle, whole models with transformers, engines with each other. A
run takes under 8 minutes on one H100 and writes benchmarks/results/<date>-gpu-check.md.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu import imports, page
from benchmarks.gpu.journal import LOST, Journal, supervise
from benchmarks.gpu.runner import Check, outcome_of, run_checks

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target

GROUPS = {
    "device": imports.ADAPTERS,
    "kernels": imports.KERNELS,
    "engine": imports.ENGINE,
    "models": imports.MODELS,
    "ranks": (*imports.ADAPTERS, "transformers"),
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
    found.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="Processes that share the checks; most of their time is compiling.",
    )
    found.add_argument("--out", type=Path, help="The page of results.")
    found.add_argument(
        "--journal", type=Path, help=argparse.SUPPRESS
    )  # given to a process that does the work, as is which of them it is
    found.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    args = parser().parse_args(arguments)
    if args.jobs < 1:
        parser().error(f"--jobs must be at least 1; it is {args.jobs}")
    absent = imports.missing(sorted({package for group in args.only for package in GROUPS[group]}))
    if absent:
        print(imports.advice(absent), file=sys.stderr)
        return 2
    if args.journal is not None:
        return _work(args)
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", "benchmarks.gpu.check", *given]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        paths = [Path(folder) / f"journal {job}" for job in range(args.jobs)]

        def work(job: int) -> int:
            return supervise([*command, "--job", str(job)], paths[job], args.limit)

        codes = list(pool.map(work, range(args.jobs)))
        journals = [Journal(path) for path in paths]
    started = all(journal.entries or code == 0 for journal, code in zip(journals, codes, strict=True))
    return _report(journals, args.out) if started else max(codes)


def _work(args: argparse.Namespace) -> int:
    """Run what the journal does not know yet."""
    faulthandler.enable()
    if args.device == "cpu":
        from tests.kernels import triton_interpreter

        triton_interpreter.start()
    from benchmarks.gpu.target import make_target

    target, journal = make_target(args.device, args.tiny), Journal(args.journal)
    journal.note(target.description() + ".")
    print(target.description(), flush=True)
    for remark in _remarks(target, args.only):
        journal.note(remark + ".")
        print(remark, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        checks = islice(_checks(target, args.only, Path(scratch)), args.job, None, args.jobs)
        return 0 if run_checks(checks, args.limit, journal, answers=target.answers) else LOST


def _remarks(target: Target, groups: Sequence[str]) -> Iterator[str]:
    """Yield remarks that qualify the results on this target."""
    if "ranks" in groups:
        from benchmarks.gpu.rank_checks import why_left_out

        yield from filter(None, [why_left_out(target)])
    if "models" in groups:
        yield from filter(None, [imports.older_oracle()])


def _report(journals: Sequence[Journal], out: Path | None) -> int:
    """Say what failed, and write the page; the exit code."""
    taken_in_turn = chain.from_iterable(zip_longest(*(journal.entries.items() for journal in journals)))
    outcomes = [outcome_of(*entry) for entry in taken_in_turn if entry is not None]
    failed = [outcome for outcome in outcomes if not outcome.passed]
    seconds = sum(outcome.seconds for outcome in outcomes)
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed in {seconds:.0f} s."
    for outcome in failed:
        print(f"\n{outcome.verdict}: {outcome.name}\n{outcome.trouble}", file=sys.stderr)
    print(summary)
    lines = page.table(
        ("verdict", "check", "error", "allowed", "s"), [outcome.cells() for outcome in outcomes]
    )
    path = out or page.RESULTS / f"{page.today()}-gpu-check.md"
    notes = dict.fromkeys(note for journal in journals for note in journal.notes)
    page.write(path, f"GPU check, {page.today()}", [*notes, summary], lines)
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


def _device(target: Target, scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import engine_checks

    return engine_checks.first_checks(target, scratch)


def _engine(target: Target, scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import engine_checks

    return engine_checks.checks(target, scratch)


def _ranks(target: Target, scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import rank_checks

    return rank_checks.checks(target, scratch)


def _cases(target: Target, _scratch: Path) -> Iterator[Check]:
    from benchmarks.gpu import kernel_checks

    return kernel_checks.small_cases(target)


_CHECKS: dict[str, Callable[[Target, Path], Iterator[Check]]] = {
    "device": _device,
    "kernels": _kernels,
    "models": _models,
    "engine": _engine,
    "ranks": _ranks,
    "cases": _cases,
}


if __name__ == "__main__":
    sys.exit(main())
