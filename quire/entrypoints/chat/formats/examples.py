"""Examples of a model's answers: what its chat template makes of a history with a call and reasoning.

Invariant: a template is foreign code, so one that fails has no examples, and an example proves a format and disproves
none that cannot be rendered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from quire.entrypoints.chat.formats.events import Event, Reasoning, ToolCall
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
THOUGHTS = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)
"""The names by which templates know the reasoning of a message."""
ANSWERS: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [CALL], **THOUGHTS},
    {"role": "assistant", "content": SAID, **THOUGHTS},
    {"role": "assistant", "content": SAID, "tool_calls": [CALL]},
)
THINKING: tuple[dict[str, Any], ...] = (
    {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled"},
    {},
)
"""Options by which templates are told to think."""


class Renderer(Protocol):
    """What is needed of a chat template."""

    def try_render(self, messages: Conversation, /, **options: Any) -> str | None:
        """Return the prompt without the options that the template does not read; None if it cannot be rendered."""
        ...


class Example(NamedTuple):
    """An answer of the model as a template writes it; `prompt` is what stands before it."""

    prompt: str
    text: str

    @property
    def has_call(self) -> bool:
        return NAME in self.text

    @property
    def has_thought(self) -> bool:
        return THOUGHT in self.text

    def calls_are_read(self, events: list[Event]) -> bool:
        """Whether these events are the call that the answer holds, and no text that looks like one."""
        calls = [event for event in events if isinstance(event, ToolCall)]
        content = "".join(event for event in events if isinstance(event, str))
        said = [(call.name, json.loads(call.arguments)) for call in calls]
        return said == [(NAME, ARGUMENTS)] and NAME not in content

    def thought_is_read(self, events: list[Event]) -> bool:
        """Whether these events have the reasoning that the answer holds."""
        return "".join(event.text for event in events if isinstance(event, Reasoning)) == THOUGHT


def examples_of(template: Renderer) -> Iterator[Example]:
    """Render the answers of `ANSWERS` with and without thinking, as far as the template can."""
    for options in THINKING:
        for answer in ANSWERS:
            found = shown(template, answer, tools=[TOOL], **options)
            if found is not None:
                yield found


def shown(template: Renderer, answer: dict[str, Any], **options: Any) -> Example | None:
    """Return an answer as the template writes it behind a question; None if it cannot.

    Some templates show a call only if its message has no content at all, or its arguments are text.
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
    """Return the message with arguments as JSON texts, and without a content that is empty."""
    functions = [call["function"] for call in answer["tool_calls"]]
    texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
    calls = [{**call, "function": text} for call, text in zip(answer["tool_calls"], texts, strict=True)]
    return {**answer, "content": answer["content"] or None, "tool_calls": calls}


def example(prompt: str, rendered: str) -> Example:
    """Return the answer at the end of a rendered history, which was to follow this prompt.

    Where the prompt is not what the history begins with, as one that ends in reasoning that is switched off, the answer
    begins where they part, but not within a marker.
    """
    if rendered.startswith(prompt):
        return Example(prompt, rendered[len(prompt) :])
    alike = (one == other for one, other in zip(prompt, rendered, strict=False))
    size = sum(1 for _ in itertools.takewhile(bool, alike))
    marker = max(rendered.rfind(char, 0, size) for char in "<[")
    if marker >= 0 and not any(char in rendered[marker:size] for char in ">]"):
        size = marker
    return Example(rendered[:size], rendered[size:])
