# SPDX-License-Identifier: Apache-2.0
"""Example answers of a model, rendered by its chat template from a history with a call and reasoning.

Invariant: a template is untrusted code; one that fails has no examples. An example can confirm a format, never exclude
one that cannot be rendered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall
from quire.inputs import Conversation

NAME, ARGUMENTS, THOUGHT, SAID = "probe_weather", {"city": "Paris", "days": 3}, "PROBE THOUGHT", "PROBE SAID"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "Days."},
    },
    "required": ["city"],
}
TOOLS = {NAME: SCHEMA}
TOOL = {
    "type": "function",
    "function": {"name": NAME, "description": "Return the weather.", "parameters": SCHEMA},
}
QUESTION = {"role": "user", "content": "PROBE QUESTION"}
CALL = {"id": "probe0001", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
# Names under which templates read a message's reasoning.
THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)
ANSWERS: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [CALL], **THOUGHTS},
    {"role": "assistant", "content": SAID, **THOUGHTS},
    {"role": "assistant", "content": SAID, "tool_calls": [CALL]},
)
THINKING: tuple[dict[str, Any], ...] = (
    {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"},
    {},
)  # Options by which templates enable thinking.


class Renderer(Protocol):
    """Chat template that can render examples."""

    def try_render(self, messages: Conversation, /, **options: Any) -> str | None:
        """Return the prompt, ignoring options that the template does not read; None if it cannot be rendered."""
        ...


class Example(NamedTuple):
    """Answer of the model as a template writes it, and the prompt before it."""

    prompt: str
    text: str

    @property
    def has_call(self) -> bool:
        return NAME in self.text

    @property
    def has_thought(self) -> bool:
        return THOUGHT in self.text

    def calls_are_read(self, events: list[Event]) -> bool:
        """Return whether these events are exactly the answer's call, without text that looks like one."""
        calls = [event for event in events if isinstance(event, ToolCall)]
        content = "".join(event for event in events if isinstance(event, str))
        said = [(call.name, json.loads(call.arguments)) for call in calls]
        return said == [(NAME, ARGUMENTS)] and NAME not in content

    def thought_is_read(self, events: list[Event]) -> bool:
        """Return whether these events have the answer's reasoning."""
        return "".join(event.text for event in events if isinstance(event, Reasoning)) == THOUGHT


def examples_of(template: Renderer) -> Iterator[Example]:
    """Yield the answers of `ANSWERS` with and without thinking, as far as the template renders them."""
    for options in THINKING:
        for answer in ANSWERS:
            found = shown(template, answer, tools=[TOOL], **options)
            if found is not None:
                yield found


def shown(template: Renderer, answer: dict[str, Any], **options: Any) -> Example | None:
    """Return an answer as the template writes it after a question; None if it cannot.

    Some templates show a call only if its message has no content, or its arguments are text.
    """
    prompt = template.try_render([QUESTION], add_generation_prompt=True, **options)
    calls = answer.get("tool_calls") or []
    name = calls[0]["function"]["name"] if calls else ""
    forms = [answer, _with_texts(answer)] if calls else [answer]
    for form in forms:
        rendered = template.try_render([QUESTION, form], add_generation_prompt=False, **options)
        if prompt is not None and rendered is not None:
            found = example(prompt, rendered)
            if name in found.text:
                return found
    return None


def _with_texts(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the message with arguments as JSON text and without empty content."""
    functions = [call["function"] for call in answer["tool_calls"]]
    texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
    calls = [{**call, "function": text} for call, text in zip(answer["tool_calls"], texts, strict=True)]
    return {**answer, "content": answer["content"] or None, "tool_calls": calls}


def example(prompt: str, rendered: str) -> Example:
    """Return the answer at the end of a rendered history, given its generation prompt.

    If the history does not begin with the prompt (for instance because the prompt disables reasoning), the answer
    begins where they differ, but not within a marker.
    """
    if rendered.startswith(prompt):
        return Example(prompt, rendered[len(prompt) :])
    alike = (one == other for one, other in zip(prompt, rendered, strict=False))
    size = sum(1 for _ in itertools.takewhile(bool, alike))
    marker = max(rendered.rfind(char, 0, size) for char in "<[")
    if marker >= 0 and not any(char in rendered[marker:size] for char in ">]"):
        size = marker
    return Example(rendered[:size], rendered[size:])
