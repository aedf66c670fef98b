# SPDX-License-Identifier: Apache-2.0
"""Structured parts of `SamplingParams`, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import ValidationError

MAX_BAD_WORDS = 128  # Token sequences, after every word has been tokenized with and without a leading space.
MAX_BAD_WORD_CHARS = 4096
MAX_BAD_WORD_TOKENS = 512  # Of all sequences together: they are checked for every token.
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1024
MAX_MARKER_TOKENS = 32
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # used where a request names none
MAX_DRY_BREAKERS = 64
MAX_DRY_BREAKER_CHARS = 40  # of one breaker
MAX_DRY_CHARS = 1024  # of all breakers of a request
_INT_RANGE = range(-(2**63), 2**64)  # Integers that fit into messages between processes.


class RepetitionDetectionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Detection of repeating output, which ends a text with finish_reason "repetition".

    Args:
        max_pattern_size: longest pattern in tokens, up to 1,024; 0 turns the search off.
        min_pattern_size: shortest pattern; 0 is 1.
        min_count: consecutive repetitions at the end of the output, 2..1,024.

    Raises:
        ValidationError: a value is of the wrong type or out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        lowest_count = 2 if self.max_pattern_size else 0
        limits = (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", lowest_count, MAX_PATTERN_COUNT),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValidationError(
                    f"repetition_detection: {name} must be an integer in [{low}, {high}], got {value!r}",
                    param="repetition_detection",
                )


class ThinkingMarkers(msgspec.Struct, frozen=True, array_like=True):
    """Token ids that open and close a reasoning section.

    `starts_open` says whether the output begins inside one; None: decided by the prompt.
    """

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    starts_open: bool | None = None

    def __post_init__(self) -> None:
        for ids in (self.start_ids, self.end_ids):
            if not 1 <= len(ids) <= MAX_MARKER_TOKENS or any(type(i) is not int for i in ids):
                raise ValidationError(
                    f"thinking_markers must be 1 to {MAX_MARKER_TOKENS} token ids each, got {ids!r:.200}",
                    param="thinking_markers",
                )


class DryBreaker(msgspec.Struct, frozen=True, array_like=True):
    """One tokenization of a DRY sequence breaker: any token of `heads`, followed by all of `tail`."""

    heads: tuple[int, ...]
    tail: tuple[int, ...] = ()


def check_dry_sequence_breakers(breakers: Sequence[str]) -> None:
    """Check the number and the length of DRY sequence breakers.

    Raises:
        ValidationError: one is empty or too long, or there are too many.
    """
    name = "dry_sequence_breakers"
    num_chars = sum(map(len, breakers))
    if len(breakers) > MAX_DRY_BREAKERS or num_chars > MAX_DRY_CHARS:
        raise ValidationError(
            f"{name} has {len(breakers)} strings of {num_chars} characters in all; the limits are "
            f"{MAX_DRY_BREAKERS} and {MAX_DRY_CHARS}",
            param=name,
        )
    for text in breakers:
        if not 1 <= len(text) <= MAX_DRY_BREAKER_CHARS:
            raise ValidationError(
                f"{name} must have strings of 1 to {MAX_DRY_BREAKER_CHARS} characters, got {text!r:.100}",
                param=name,
            )


def checked_repetition_detection(value: Any) -> RepetitionDetectionParams | None:
    """Return the structure, which may be given as a mapping; None if it has no effect.

    Raises:
        ValidationError: it is neither, or a value is out of range.
    """
    if isinstance(value, dict):
        unknown = [name for name in value if name not in RepetitionDetectionParams.__struct_fields__]
        if unknown:
            raise ValidationError(
                f"repetition_detection has no field {unknown[0]!r:.100}", param="repetition_detection"
            )
        value = RepetitionDetectionParams(**value)
    if value is not None and not isinstance(value, RepetitionDetectionParams):
        raise ValidationError(
            f"repetition_detection must be RepetitionDetectionParams, got {value!r:.200}",
            param="repetition_detection",
        )
    return value if value is not None and value.max_pattern_size else None


def check_bad_words(words: Sequence[str]) -> None:
    """Check the words themselves; the number of token sequences is known only after tokenizing.

    Raises:
        ValidationError: one is empty, or there are too many.
    """
    if any(not word.strip() for word in words):
        raise ValidationError("bad_words must not contain an empty word", param="bad_words")
    num_chars = sum(map(len, words))
    if len(words) > MAX_BAD_WORDS or num_chars > MAX_BAD_WORD_CHARS:
        raise ValidationError(
            f"bad_words has {len(words)} words of {num_chars} characters in all; the limits are {MAX_BAD_WORDS} and "
            f"{MAX_BAD_WORD_CHARS}",
            param="bad_words",
        )


def checked_bad_words_token_ids(sequences: Any) -> tuple[tuple[int, ...], ...]:
    """Return forbidden token sequences as tuples without duplicates.

    Raises:
        ValidationError: one is empty or no list of ids, or there are too many.
    """
    if not isinstance(sequences, list | tuple):
        raise ValidationError(
            f"bad_words_token_ids must be a list of lists, got {sequences!r:.200}",
            param="bad_words_token_ids",
        )
    for ids in sequences:
        if not isinstance(ids, list | tuple) or not ids or any(type(i) is not int for i in ids):
            raise ValidationError(
                f"bad_words_token_ids must have lists of token ids, got {ids!r:.200}",
                param="bad_words_token_ids",
            )
    distinct = tuple(dict.fromkeys(tuple(ids) for ids in sequences))
    num_tokens = sum(map(len, distinct))
    if len(distinct) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
        raise ValidationError(
            f"bad_words make {len(distinct)} sequences of {num_tokens} tokens in all, with and without a leading "
            f"space; the limits are {MAX_BAD_WORDS} and {MAX_BAD_WORD_TOKENS}",
            param="bad_words",
        )
    return distinct


def check_extra_args(extra: Any) -> None:
    """Check that arguments for custom code are plain data with string keys, which can cross process borders.

    Raises:
        ValidationError: they contain something else.
    """
    if not isinstance(extra, dict):
        raise ValidationError(f"extra_args must be a dict, got {extra!r:.200}", param="extra_args")
    stack: list[Any] = [extra]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            bad = next((key for key in value if not isinstance(key, str)), None)
            if bad is not None:
                raise ValidationError(
                    f"extra_args has the key {bad!r:.100}, which is no text", param="extra_args"
                )
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, int) and value not in _INT_RANGE:
            raise ValidationError(
                f"extra_args has {value}, which does not fit in 64 bits", param="extra_args"
            )
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise ValidationError(
                f"extra_args has a {type(value).__name__}, which is no plain data", param="extra_args"
            )
