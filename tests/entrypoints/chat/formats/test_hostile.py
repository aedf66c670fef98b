# SPDX-License-Identifier: Apache-2.0
"""Tests of hostile answers: long ones are parsed token by token in linear time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.tools import FORMATS
from tests.entrypoints.chat.formats.reading import read
from tests.entrypoints.chat.formats.transcripts import WEATHER

NUM_CHARS = 60_000
"""Of an answer of some 15,000 tokens."""
HANG_S = 15.0


def monsters(row: ToolFormat) -> Iterator[str]:
    """Nothing but beginnings; a call whose arguments never end, nest for ever, or are one text."""
    written = row.write(WEATHER)
    before, _, after = written.partition("Paris")
    begun = [*row.opens, *row.closes, row.opening, written[: len(written) // 2], "<", "\\", '"']
    yield from (piece * (NUM_CHARS // len(piece)) for piece in begun if piece)
    for filling in ("[", "{", '{"a":', '"', "\\", "x", " ", "\n", "<", "'", "(", *row.closes):
        yield before + filling * (NUM_CHARS // max(1, len(filling)))
    yield before + "x" * NUM_CHARS + after


@pytest.mark.more
@pytest.mark.item(18)
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_long_answers_take_linear_time_and_fail_nothing(row: ToolFormat) -> None:
    for number, monster in enumerate(monsters(row)):
        begun = time.process_time()
        pieces = [monster[start : start + 4] for start in range(0, len(monster), 4)]
        found = read(row, pieces)
        took = time.process_time() - begun
        assert took < HANG_S, f"monster {number}, {monster[:40]!r}, takes {took:.0f} s"
        assert read(row, [monster]) == found
