# SPDX-License-Identifier: Apache-2.0
"""Sets engines up and measures them in turn.

Invariant: in a round every engine runs once, so that a drift of the machine meets all of them; what fails is recorded
with its reason and left out from then on, and the others go on; a rate that other programs disturbed does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.compare import disturbance, records
from benchmarks.compare.engines.base import Engine, Rate, Task
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Record


@dataclass(frozen=True)
class Session:
    """Engines and cases of a comparison, and the file that collects the results."""

    engines: dict[str, Engine]
    checkpoint: Path
    isa: Isa
    cases: Sequence[str]
    num_rounds: int
    limit_s: float
    results: Path
    say: Callable[[str], None] = print


def measure(session: Session, max_runs: int = 0) -> bool:
    """Run what is still missing, at most `max_runs` runs of an engine (0: all); returns whether anything is left."""
    ready: dict[tuple[str, str], bool] = {}
    for count, (name, task) in enumerate(missing(session)):
        if max_runs and count >= max_runs:
            return True
        key = (name, task.precision)
        if key not in ready:
            ready[key] = get_ready(session, *key)
        if ready[key]:
            _run(session, name, task)
    return False


def get_ready(session: Session, name: str, precision: str) -> bool:
    """Set an engine up and give it the checkpoint; returns whether that went well."""
    engine = session.engines[name]
    try:
        session.say(f"{name} {precision}: getting ready")
        engine.set_up(session.isa)
        engine.prepare(session.checkpoint, precision)
    except ProgramError as error:
        session.say(f"{name} {precision}: cannot be set up: {error}")
        records.append(session.results, [Record(name, precision, "", 0, None, str(error))])
        return False
    return True


def missing(session: Session) -> Iterator[tuple[str, Task]]:
    """The runs that the session's file does not yet hold, in the order in which they are due.

    The file is read again before each run is chosen, so a failure takes the case out of later rounds. Rates that other
    programs disturbed are missing again, for the next time.
    """
    for number in range(session.num_rounds):
        for name, engine in session.engines.items():
            for precision in engine.precisions:
                cases = _open_cases(session, name, precision, number)
                if cases:
                    yield name, Task(session.isa, precision, cases, number, session.limit_s)


def _open_cases(session: Session, name: str, precision: str, number: int) -> list[str]:
    known = [
        record
        for record in records.read(session.results)
        if (record.engine, record.precision) == (name, precision)
    ]
    if any(record.error and not record.case for record in known):
        return []
    closed = {one.case for one in known if one.error or (one.round == number and not one.disturbed)}
    engine = session.engines[name]
    wanted = session.cases if set(session.cases) & set(engine.cases) else engine.cases
    return [case for case in wanted if case in engine.cases and case not in closed]


def _run(session: Session, name: str, task: Task) -> None:
    """One run of an engine; if it breaks off, the case it was at has failed and the later ones get another run."""
    left = list(task.cases)
    while left:
        found, reason, others = _watched_run(session.engines[name], replace(task, cases=tuple(left)))
        done = [Record(name, task.precision, rate.case, task.round, rate.rate, "", others) for rate in found]
        left = left[len(done) :]
        if left:
            done.append(Record(name, task.precision, left.pop(0), task.round, None, reason, others))
        records.append(session.results, done)
        for record in done:
            session.say(_line(record))


def _watched_run(engine: Engine, task: Task) -> tuple[list[Rate], str, float]:
    """The rates of the cases that were done, why it broke off, and the share of time that other programs took."""
    found: list[Rate] = []
    reason = "the engine ended without a result"
    before = disturbance.now()
    try:
        for rate in engine.measure(task):
            found.append(rate)  # noqa: PERF402 - what was found before an error counts
    except ProgramError as error:
        reason = str(error)
    return found, reason, disturbance.now().others_share(before)


def _line(record: Record) -> str:
    outcome = record.error or f"{record.rate:,.1f} per second"
    disturbed = f", thrown away: other programs took {record.others:.0%}" if record.disturbed else ""
    return f"round {record.round} {record.engine} {record.precision} {record.case}: {outcome}{disturbed}"


def set_up_all(session: Session, names: Iterable[str]) -> None:
    """Get engines ready without measuring them."""
    for name in names:
        for precision in session.engines[name].precisions:
            get_ready(session, name, precision)
