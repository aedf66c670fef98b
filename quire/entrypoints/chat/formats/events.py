"""What is found in a model's answer; plain text is a `str`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: name -> JSON schema of its arguments."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text of a JSON object, `id` what the model called it."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself before its answer."""

    text: str


Event = str | Reasoning | ToolCall
