# SPDX-License-Identifier: Apache-2.0
"""A tokenizer in which each token is one character, for programs that read texts and not ids."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_CHARACTER = 0x20000
NUM_RESERVED = 3
"""Ids that llama.cpp takes to be unknown, the first and the last token of a text."""


def text_of(ids: Sequence[int]) -> str:
    """The text whose tokens these are."""
    return "".join(chr(FIRST_CHARACTER + index) for index in ids)
