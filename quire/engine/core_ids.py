# SPDX-License-Identifier: Apache-2.0
"""Numbers and request ids that say which front end made them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

NUMBERS = 1 << 32  # Requests, or calls, numbered by one front end; the next front end's numbers follow.


def numbers_of(front_end: int) -> Iterator[int]:
    """Return the numbers of this front end, in order; the first front end's begin at 0."""
    return itertools.count(front_end * NUMBERS)


def front_end_of_number(number: int) -> int:
    """Return the front end that gave a number."""
    return number // NUMBERS


def front_end_of_request(core_request_id: str) -> int:
    """Return the front end of a sequence: its number is at the end of the id, before a fork's index.

    An id that no front end has given counts as the first one's.
    """
    try:
        return front_end_of_number(int(core_request_id.rpartition("-")[2].partition(".")[0], 16))
    except ValueError:
        return 0
