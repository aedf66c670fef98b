# SPDX-License-Identifier: Apache-2.0
"""The documented tables are those of the code."""

from __future__ import annotations

from pathlib import Path

from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.reasoning import FORMATS as REASONING_FORMATS
from quire.entrypoints.chat.formats.tools import FORMATS as TOOL_FORMATS

PAGE = Path(__file__).parents[4] / "docs" / "tool_calling.md"
TWO_CALLS = [("f", {"a": "x"}), ("g", {})]


def code(text: str) -> str:
    """A code span in a table, on one line."""
    shown = text.replace("\n", "↵").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def tool_row(row: ToolFormat) -> str:
    return f"| `{row.name}` | {', '.join(row.aliases)} | {code(row.write(TWO_CALLS))} |"


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    tools = [tool_row(row) for row in TOOL_FORMATS]
    reasoning = [
        f"| `{row.name}` | {', '.join(row.aliases)} | "
        f"{' '.join(map(code, row.opens))} … {' '.join(map(code, row.closes))} |"
        for row in REASONING_FORMATS
    ]
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(tools) in page, "\n".join(tools)
    assert "\n".join(reasoning) in page, "\n".join(reasoning)
