# SPDX-License-Identifier: Apache-2.0
"""The raw results of a session: one JSON object per line, appended as soon as it is known.

Invariant: a file holds one instruction set's session; nothing in it is ever changed, so a session can be cut off
anywhere and go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Accuracy:
    """Change of the probability of the text's tokens, share of equal likeliest tokens, and both perplexities."""

    rms_change_percent: float
    same_top_percent: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """The part by which the perplexity is larger than the reference's."""
        return self.perplexity / self.reference_perplexity - 1


@dataclass(frozen=True)
class Score:
    """The accuracy of a weight format on a model and a text, or the reason why there is none."""

    engine: str
    precision: str
    model: str
    text: str
    accuracy: Accuracy | None
    error: str = ""
    seconds: float = 0.0


def append(path: Path, records: Iterable[Record | Score]) -> None:
    """Add records to a session's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read(path: Path) -> list[Record]:
    """Return the rates of a session so far; none if it has not begun."""
    return [Record(**one) for one in _objects(path) if "case" in one]


def read_scores(path: Path) -> list[Score]:
    """Return the scores of a session so far."""
    scores = (one for one in _objects(path) if "accuracy" in one)
    return [Score(**one | {"accuracy": _accuracy(one["accuracy"])}) for one in scores]


def _accuracy(fields: dict[str, float] | None) -> Accuracy | None:
    return None if fields is None else Accuracy(**fields)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())
