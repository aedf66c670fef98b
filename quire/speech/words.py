# SPDX-License-Identifier: Apache-2.0
"""Words of a segment with their times, from the times of tokens.

Invariant: the words of a segment concatenate to its text if that is valid UTF-8, and their times never go back.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Codes of languages whose words are not separated: each character is one."""
BEFORE_WORD = "\"'“¡¿([{-"
BEHIND_WORD = "\"'.。,，!！?？:：”)]}、"
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Word:
    """Word of a transcript.

    Args:
        text: with its leading space and its punctuation.
        start, end: seconds from the sound's start.
    """

    text: str
    start: float
    end: float


@dataclass
class _WordGroup:
    """Text of adjacent tokens [first, last]."""

    text: str
    first: int
    last: int

    def add(self, other: _WordGroup) -> None:
        """Append the group behind this one."""
        self.text += other.text
        self.last = other.last


def words_of(
    tokens: Sequence[int],
    times: Sequence[tuple[float, float]],
    language: str,
    decode: Callable[[list[int]], str],
) -> list[Word]:
    """Return the words of text tokens, each with its start and end in `times`."""
    groups = _characters(tokens, decode)
    if language not in WITHOUT_SPACES:
        groups = _joined_by_spaces(groups)
    groups = _with_punctuation(groups)
    return [Word(one.text, times[one.first][0], times[one.last][1]) for one in groups]


def _characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[_WordGroup]:
    """Group tokens until each group's text is whole characters."""
    whole = decode(list(tokens))
    groups, first, length = list[_WordGroup](), 0, 0
    for last in range(len(tokens)):
        text = decode(list(tokens[first : last + 1]))
        unfinished = text.find(_UNFINISHED)
        place = length + unfinished
        # The mark of an unfinished character may also be a character of the text.
        if unfinished < 0 or place >= len(whole) or whole[place] == _UNFINISHED:
            groups.append(_WordGroup(text, first, last))
            first, length = last + 1, length + len(text)
    if first < len(tokens):
        groups.append(_WordGroup(decode(list(tokens[first:])), first, len(tokens) - 1))
    return groups


def _joined_by_spaces(groups: list[_WordGroup]) -> list[_WordGroup]:
    """Join groups up to the next that begins with a space or is punctuation."""
    words = list[_WordGroup]()
    for one in groups:
        if not words or one.text.startswith(" ") or one.text.strip() in string.punctuation:
            words.append(one)
        else:
            words[-1].add(one)
    return words


def _with_punctuation(groups: list[_WordGroup]) -> list[_WordGroup]:
    """Join opening marks to the word behind them, and closing marks to the word before."""
    opened = list[_WordGroup]()
    for one in reversed(groups):
        if opened and one.text.startswith(" ") and one.text.strip() in BEFORE_WORD:
            one.add(opened.pop())
        opened.append(one)
    words = list[_WordGroup]()
    for one in reversed(opened):
        if words and not words[-1].text.endswith(" ") and one.text in BEHIND_WORD:
            words[-1].add(one)
        else:
            words.append(one)
    return words
