# SPDX-License-Identifier: Apache-2.0
"""Detection, from a template's options and output, whether thinking is disabled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.chat.formats.format import ReasoningFormat
from quire.entrypoints.chat.template import ChatTemplate

SWITCHES = frozenset(
    {"enable_thinking", "thinking", "thinking_mode", "thinking_option", "thinking_effort", "thinking_budget",
     "enable_reasoning", "reasoning", "reasoning_effort", "reasoning_budget", "think"}
)  # fmt: skip  # Options by which published templates enable and disable thinking.

PAIRS: tuple[tuple[Any, Any], ...] = (
    (True, False), ("high", "none"), ("on", "off"), ("enabled", "disabled"), ("thinking", "chat"),
)  # fmt: skip  # Values (on, off) of these options; a budget of 0 equals False.

MAX_KEPT = 64


class ThinkingSwitch:
    """Detector of disabled thinking.

    Args:
        reasoning: the model's reasoning format; None if it has none.
    """

    def __init__(self, template: ChatTemplate, reasoning: ReasoningFormat | None) -> None:
        self._template = template
        self._reasoning = reasoning
        self._names = sorted(SWITCHES & template.variables)
        self._known: dict[tuple[str, ...], bool] = {}

    def is_off(self, options: Mapping[str, Any]) -> bool:
        """Return whether these options disable reasoning."""
        given = {name: options[name] for name in self._names if name in options}
        key = tuple(f"{name}={value!r}" for name, value in given.items())
        if key not in self._known:
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[key] = self._find_out(given)
        return self._known[key]

    def _find_out(self, given: Mapping[str, Any]) -> bool:
        if self._reasoning is None:
            return False
        if any(value == off for value in given.values() for _, off in PAIRS):
            return True
        prompt = self._template.probe(given)
        return prompt is not None and any(self._lacks(prompt, name, given) for name in self._names)

    def _lacks(self, prompt: str, name: str, given: Mapping[str, Any]) -> bool:
        """Return whether the prompt equals the one with the option off, or lacks the reasoning that it opens."""
        assert self._reasoning is not None
        for on, off in PAIRS:
            with_it, without = (self._template.probe({**given, name: value}) for value in (on, off))
            if with_it in (None, without, prompt):
                continue
            if prompt == without or self._reasoning.is_open_after(with_it):
                return True
        return False
