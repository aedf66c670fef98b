"""`python -m benchmarks.compare`: set up the peers, measure all engines in turn, write the page of results."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import checkpoint, records, report, runner
from benchmarks.compare.cases import CASES
from benchmarks.compare.engines import ENGINE_NAMES, engines_in
from benchmarks.compare.goals import GOALS
from benchmarks.compare.isa import ISAS

STEPS = ("set-up", "measure", "report")
_HERE = Path(__file__).parent


def parser() -> argparse.ArgumentParser:
    """The command line."""
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
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the steps asked for."""
    args = parser().parse_args(arguments)
    # A program that is told to stop still ends the engine that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    date = datetime.date.today().isoformat()
    folder = args.folder.resolve()
    every = engines_in(folder)
    session = runner.Session(
        engines={name: every[name] for name in args.engines},
        checkpoint=checkpoint.ensure(folder / f"checkpoint-{args.shape}", args.shape),
        isa=ISAS[args.isa],
        cases=args.cases,
        num_rounds=args.rounds,
        limit_s=args.limit,
        results=args.raw or folder / f"{date}-{args.shape}-{args.isa}.jsonl",
    )
    steps = [args.only] if args.only else list(STEPS)
    if "set-up" in steps:
        runner.set_up_all(session, args.engines)
    if "measure" in steps and runner.measure(session, args.max_runs):
        return
    if "report" in steps:
        text = report.page(records.read(session.results), every, session.isa, date, args.shape)
        shape = "" if args.shape == checkpoint.DENSE else f"{args.shape.removeprefix('dummy-')}-"
        output = args.output or _HERE.parent / "results" / f"{date}-compare-{shape}{args.isa}.md"
        output.write_text(text)
        print(f"{text}\nwritten to {output}")


if __name__ == "__main__":
    main()
