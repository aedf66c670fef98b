# SPDX-License-Identifier: Apache-2.0
"""The page of results: a table in Markdown, under a heading with the device and the versions."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def today() -> str:
    return datetime.date.today().isoformat()


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]


def write(path: Path, title: str, paragraphs: Sequence[str], lines: Sequence[str]) -> None:
    """Write a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {title}", "", *paragraphs, "", *lines, ""]))
