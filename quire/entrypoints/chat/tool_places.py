# SPDX-License-Identifier: Apache-2.0
"""Places where chat templates read the tools of a request: a variable, or a field of the system message.

Invariant: the messages of the client stay as they are; a template that reads the field gets a copy with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from quire.inputs import ChatMessage

FIELD = "tools"
PROBE_NAME = "quire_probes_tools"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
PROBE_MESSAGES: list[ChatMessage] = [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class ToolPlace:
    """Place where a template reads tools.

    Args:
        variable: name of the template's variable; empty for the field `tools` of the system message.
        as_text: whether the field is JSON text of the functions instead of the list of tools.
    """

    variable: str = ""
    as_text: bool = False

    def put(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any]
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Return messages and options with the option `tools` moved to this place."""
        tools = options.get(FIELD)
        if not tools or self.variable == FIELD:
            return list(messages), dict(options)
        others = {name: value for name, value in options.items() if name != FIELD}
        if self.variable:
            return list(messages), {self.variable: tools, **others}
        return _with_field(messages, _functions_text(tools) if self.as_text else list(tools)), others


TOOLS_VARIABLE = ToolPlace(FIELD)
# Places in published templates: nearly all; SmolLM 3; GLM-4 9B of 2024; Phi-4-mini.
PLACES = (TOOLS_VARIABLE, ToolPlace("xml_tools"), ToolPlace(), ToolPlace(as_text=True))


def place_of_tools(
    tree: nodes.Template, variables: frozenset[str], shows: Callable[[ToolPlace, str], bool]
) -> ToolPlace | None:
    """Return the place where a template reads tools; None if it has none.

    Args:
        tree: the parsed template.
        variables: variables that the template reads.
        shows: returns whether a text is in the prompt of `PROBE_MESSAGES` with `PROBE_TOOL` at a place.
    """
    reads_field = any(one.value == FIELD for one in tree.find_all(nodes.Const)) or any(
        one.attr == FIELD for one in tree.find_all(nodes.Getattr)
    )
    places = [place for place in PLACES if (place.variable in variables if place.variable else reads_field)]
    shown = next((place for place in places if shows(place, PROBE_NAME)), None)
    return shown or next((place for place in places if place.variable), None)


def _with_field(messages: Sequence[ChatMessage], tools: Any) -> list[ChatMessage]:
    """Return the messages with the field in the system message, which is the first one."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], FIELD: tools}, *messages[1:]]
    return [{"role": "system", "content": "", FIELD: tools}, *messages]


def _functions_text(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
