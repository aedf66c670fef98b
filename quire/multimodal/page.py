# SPDX-License-Identifier: Apache-2.0
"""Generator of the table of families in docs/multimodal.md: `python -m quire.multimodal.page`.

Invariant: the part of the page between two comments is a function of the table of families; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from quire.multimodal.families import FAMILIES

PAGE = Path("docs/multimodal.md")
BEGIN, END = "<!-- families: python -m quire.multimodal.page -->", "<!-- end of families -->"


def table() -> str:
    """Return the table in Markdown."""
    rows = [
        f"| `{name}` | {family.images or 'none'} | {family.videos or 'none'} | {family.sounds or 'none'} |"
        for name, family in FAMILIES.items()
        if family.images or family.sounds
    ]
    head = ["| architecture | placeholders of an image | of a video | of a sound |", "|---|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def with_table(page: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
