# SPDX-License-Identifier: Apache-2.0
"""Rows of a request that searches: one worker row and one set of block tables per beam.

Invariant: all beams have one length, so a request has one number of known and of computed tokens, whatever its beams
are. It starts, is preempted and finishes as a whole, and a preempted search begins again. The search itself is a
feature's (`quire.features.BEAM_SEARCH`): it receives the most likely next tokens of each beam, and selects the next
beams. A next beam keeps its parent's row, or takes over the row of a beam that nothing continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.features import BEAM_SEARCH
from quire.plugins import import_place
from quire.sampling_params import BeamSearchParams
from quire.scheduler.output import TokenLogprobs

_MARK = ".beam"


class LiveBeam(Protocol):
    """Beam that needs a next token."""

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens."""

    @property
    def parent(self) -> int:
        """Index of the last step's live beam that it continues."""


class Search(Protocol):
    """Pure state of a search."""

    @property
    def live(self) -> Sequence[LiveBeam]:
        """Beams that need a next token, at most as many as the search is wide; one without tokens at first."""

    @property
    def num_logprobs(self) -> int:
        """Most likely tokens needed of each live beam in the next step."""

    @property
    def is_done(self) -> bool:
        """True if the search is complete."""

    def restart(self) -> None:
        """Begin again."""

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Advance by one step; entry i has the most likely next tokens of live beam i, behind its own token."""


class Branch(NamedTuple):
    """Next beams: row `rows[i]` continues row `sources[i]`, perhaps itself; row 0 is among `rows`."""

    rows: list[int]
    sources: list[int]


class Beams:
    """Rows of one search.

    Args:
        request_id: of the request, and of row 0.

    Attributes:
        live: row of each live beam, in the search's order; row 0 alone until the prompt is computed.
        further: rows beside row 0 that hold block tables and worker rows.
        branch: next beams, which no plan has yet.
    """

    def __init__(self, request_id: str, params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self.width = params.beam_width
        self.search: Search = import_place(BEAM_SEARCH)(params, eos_token_ids)
        self._names = [request_id, *(f"{request_id}{_MARK}{row}" for row in range(1, self.width))]
        self.live = [0]
        self.further: set[int] = set()
        self.branch: Branch | None = None

    @property
    def has_begun(self) -> bool:
        """True once the prompt is computed, and the rows are those of beams."""
        return bool(self.search.live[0].token_ids)

    def name(self, row: int) -> str:
        """Return the id of a row."""
        return self._names[row]

    @property
    def names(self) -> list[str]:
        """Ids of the live rows, in the search's order."""
        return [self._names[row] for row in self.live]

    @property
    def further_names(self) -> list[str]:
        """Ids of the rows of `further`."""
        return [self._names[row] for row in sorted(self.further)]

    def restart(self) -> None:
        """Begin again with the prompt; the tables are freed."""
        self.search.restart()
        self.live, self.branch = [0], None
        self.further.clear()

    def kept_and_moved(self, branch: Branch) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the rows that continue themselves, and (source, target) of the others."""
        pairs = [(self._names[source], self._names[row]) for row, source in zip(*branch, strict=True)]
        return [row for source, row in pairs if row == source], [pair for pair in pairs if pair[0] != pair[1]]

    def has_row(self, row: int) -> bool:
        """Return whether the worker has a row."""
        return row == 0 or row in self.further

    def settle(self, branch: Branch) -> list[str]:
        """Note that a plan has the next beams; return the rows that nothing continues any more."""
        left = self.further.difference(branch.rows)
        self.further = set(branch.rows) - {0}
        self.branch = None
        return [self._names[row] for row in sorted(left)]

    def advance(self, entries: Sequence[TokenLogprobs]) -> bool:
        """Select the next beams and their rows; False if the search is complete."""
        self.search.advance(entries)
        if self.search.is_done:
            return False
        sources = [self.live[beam.parent] for beam in self.search.live]
        self.live = _rows(sources, self.width)
        self.branch = Branch(self.live, sources)
        return True


def _rows(sources: Sequence[int], width: int) -> list[int]:
    """Return a row for each next beam: its source's for the first of a source, else one that nothing continues.

    Row 0, which stands for the request, is always among them.
    """
    firsts: dict[int, int] = {}
    for place, source in enumerate(sources):
        firsts.setdefault(source, place)
    keeping = set(firsts.values())
    if 0 not in firsts and len(keeping) == len(sources):
        keeping.remove(0)
    others = iter([row for row in range(width) if row not in firsts])
    return [source if place in keeping else next(others) for place, source in enumerate(sources)]


def request_id_of(row_name: str) -> str:
    """Return the id of the request that has a row of this id."""
    name, mark, row = row_name.rpartition(_MARK)
    return name if mark and row.isdecimal() else row_name
