"""The raw results of a session: one JSON object per line, appended as soon as it is known.

Invariant: a file holds one instruction set's session; nothing in it is ever changed, so a session can be cut off
anywhere and go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.compare.disturbance import MAX_SHARE


@dataclass(frozen=True)
class Record:
    """One rate, or the reason why there is none. `case` is empty where the engine could not be set up at all.

    `others` is the share of the processors' time that other programs took during the run.
    """

    engine: str
    precision: str
    case: str
    round: int
    rate: float | None
    error: str = ""
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether the rate says nothing, because other programs were running."""
        return self.rate is not None and self.others > MAX_SHARE


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a session's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read(path: Path) -> list[Record]:
    """The session so far; empty if it has not begun."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
