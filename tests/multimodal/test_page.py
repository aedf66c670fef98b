# SPDX-License-Identifier: Apache-2.0
"""The table of families in the docs is generated."""

from __future__ import annotations

from pathlib import Path

from quire.multimodal.page import with_table

PAGE = Path(__file__).parents[2] / "docs/multimodal.md"


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page
