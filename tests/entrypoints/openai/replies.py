# SPDX-License-Identifier: Apache-2.0
"""Replies of the fake model for comparisons of answers across API shapes."""

from __future__ import annotations

CALL = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
REPLIES = (
    "Reply é!",
    "",
    CALL,
    f"Wait. {CALL}{CALL}",
    f"{CALL} done",
    f"a {CALL} b {CALL} c",
    "<tool_call>{no</tool_call>",
)
ODD = (
    0, 1, -1, 3.5, 1e300, 10**19, True, False, "", "x", "é\0", [], [1], ["a"], [[]], [None], {}, {"a": 1},
    {"type": "text"},
    {"type": "x", "name": 5}, [{"type": "text", "text": 5}], [{"type": "text", "text": "hi"}], [{"role": "user"}],
    [{"role": "tool", "content": []}], {"type": "function", "name": "f"}, [{"type": "function", "name": "f"}], "auto",
    [{"name": "f", "input_schema": {}}],
)  # fmt: skip
"""Values to put where they do not belong."""
