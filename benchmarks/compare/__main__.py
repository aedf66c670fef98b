# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare`: set up the peers, measure speed in turn and accuracy, write the page of results."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import accuracy, checkpoint, records, report, runner
from benchmarks.compare.cases import CASES
from benchmarks.compare.engines import ENGINE_NAMES, engines_in
from benchmarks.compare.engines.base import Engine
from benchmarks.compare.goals import GOALS
from benchmarks.compare.isa import ISAS
from benchmarks.compare.reference import DEFAULT_TEXT, NUM_CHUNKS, REAL_MODELS, text_of

STEPS = ("set-up", "measure", "accuracy", "report")
_HERE = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    found.add_argument(
        "--isa", choices=ISAS, default="native", help="Instruction set that all engines are held to."
    )
    found.add_argument(
        "--shape", choices=tuple(GOALS), default=checkpoint.DENSE, help="Of the model, in benchmarks/models."
    )
    found.add_argument("--rounds", type=int, default=3, help="How often each engine takes its turn.")
    found.add_argument("--engines", nargs="+", choices=ENGINE_NAMES, default=ENGINE_NAMES)
    found.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    found.add_argument("--only", choices=STEPS, help="One step instead of all.")
    found.add_argument(
        "--max-runs", type=int, default=0, help="Stop after so many runs of an engine; call again to go on."
    )
    found.add_argument("--limit", type=float, default=600.0, help="Seconds that one run may take.")
    found.add_argument(
        "--folder", type=Path, default=_HERE / ".peers", help="Environments, builds, checkpoints."
    )
    found.add_argument(
        "--raw",
        type=Path,
        help="Raw results; a file that exists is continued. Default: today's in the folder.",
    )
    found.add_argument("--output", type=Path, help="Page of results. Default: in benchmarks/results.")
    _add_accuracy(found)
    return found


def _add_accuracy(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("accuracy")
    group.add_argument("--models", nargs="+", choices=REAL_MODELS, default=tuple(REAL_MODELS))
    group.add_argument(
        "--formats",
        nargs="+",
        choices=accuracy.FORMATS,
        default=(),
        metavar="FORMAT",
        help="Weight formats whose accuracy is measured. Default: those of the table of speed. Any of: "
        + "; ".join(accuracy.FORMATS),
    )
    group.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=DEFAULT_TEXT,
        help="Files. Default: license and two documents.",
    )
    group.add_argument("--num-chunks", type=int, default=NUM_CHUNKS, help="Of 512 tokens, at most so many.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps that are asked for."""
    args = parser().parse_args(arguments)
    # A program that is told to stop still ends the engine that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    date = datetime.date.today().isoformat()
    folder = args.folder.resolve()
    every = engines_in(folder)
    steps = [args.only] if args.only else list(STEPS)
    results = args.raw or folder / f"{date}-{args.shape}-{args.isa}.jsonl"
    if {"set-up", "measure"} & set(steps) and _speed(args, every, folder, results, steps):
        return
    if "accuracy" in steps and _accuracy(args, folder, results):
        return
    if "report" in steps:
        rates, scores = records.read(results), records.read_scores(results)
        text = report.page(rates, every, ISAS[args.isa], date, args.shape, scores)
        shape = "" if args.shape == checkpoint.DENSE else f"{args.shape.removeprefix('dummy-')}-"
        output = args.output or _HERE.parent / "results" / f"{date}-compare-{shape}{args.isa}.md"
        output.write_text(text)
        print(f"{text}\nwritten to {output}")


def _speed(
    args: argparse.Namespace, every: dict[str, Engine], folder: Path, results: Path, steps: Sequence[str]
) -> bool:
    """Set engines up and measure rates; return whether any are left to measure."""
    session = runner.Session(
        engines={name: every[name] for name in args.engines},
        checkpoint=checkpoint.ensure(folder / f"checkpoint-{args.shape}", args.shape),
        isa=ISAS[args.isa],
        cases=args.cases,
        num_rounds=args.rounds,
        limit_s=args.limit,
        results=results,
    )
    if "set-up" in steps:
        runner.set_up_all(session, args.engines)
    return "measure" in steps and runner.measure(session, args.max_runs)


def _accuracy(args: argparse.Namespace, folder: Path, results: Path) -> bool:
    """Measure accuracy; return whether any rows are left to measure."""
    session = accuracy.Session(
        engines=args.engines,
        models=args.models,
        formats=args.formats,
        text=text_of(args.text, args.num_chunks),
        isa=ISAS[args.isa],
        folder=folder,
        limit_s=args.limit,
        results=results,
        scorers=accuracy.SCORERS,
    )
    return accuracy.measure(session, args.max_runs)


if __name__ == "__main__":
    main()
