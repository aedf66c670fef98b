# SPDX-License-Identifier: Apache-2.0
"""Every promise has its test, and the page lists them."""

from __future__ import annotations

from tests.fixtures.folded import folded
from tests.reliability.items import ITEMS
from tests.reliability.table import PAGE, marked_tests, page


@folded("number", range(1, 61))
def test_an_item_has_a_test(number: int) -> None:
    assert number in ITEMS
    assert marked_tests()[number]


def test_page_matches_the_marks() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.reliability.table"


def test_page_has_sixty_promises() -> None:
    assert sorted(ITEMS) == list(range(1, 61))
