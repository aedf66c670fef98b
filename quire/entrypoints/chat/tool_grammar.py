"""The grammar of tool calls: fixed text in the model's own format, and arguments of each function's schema.

Invariant: what the grammar takes is what the parser of the same format finds. A format is data: how a call begins, how
it ends, and what stands between two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]
Tag = dict[str, Any]


class CallFormat(NamedTuple):
    """How a model writes calls.

    `begin` holds "{name}", which stands for the function's name as JSON.
    """

    trigger: str
    begin: str
    end: str
    separator: str


HERMES = CallFormat(
    trigger="<tool_call>",
    begin='<tool_call>\n{"name": {name}, "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)


def calls_only(calls: CallFormat, functions: Iterable[tuple[str, Schema]], *, at_most_one: bool) -> Tag:
    """A text that is one or more calls of these functions (name, schema of the arguments), and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": _tags(calls, functions),
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": at_most_one,
    }


def calls_in_text(calls: CallFormat, functions: Iterable[tuple[str, Schema]], *, at_most_one: bool) -> Tag:
    """Any text, in which what begins like a call is one of these."""
    return {
        "type": "triggered_tags",
        "triggers": [calls.trigger],
        "tags": _tags(calls, functions),
        "at_least_one": False,
        "stop_after_first": at_most_one,
    }


def _tags(calls: CallFormat, functions: Iterable[tuple[str, Schema]]) -> list[Tag]:
    return [
        {
            "type": "tag",
            "begin": calls.begin.replace("{name}", json.dumps(name, ensure_ascii=False)),
            "content": {"type": "json_schema", "json_schema": dict(schema)},
            "end": calls.end,
        }
        for name, schema in functions
    ]


CALL_FORMATS = {"hermes": HERMES}
"""Of the formats whose calls can be required: how these are written."""
