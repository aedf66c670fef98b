"""What is found in a model's answer; plain text is a `str`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.outputs import ToolCall as ToolCall

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: name -> JSON schema of its arguments."""


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself before its answer."""

    text: str


Event = str | Reasoning | ToolCall
