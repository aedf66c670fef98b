"""`functions` and `function_call`, as chat completions had them before `tools` and `tool_choice`.

Invariant: such a request is a request with tools under all of their rules, told in the words that the client knows; its
answer has one call at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import UNSET, UnsetType

from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, Tool
from quire.entrypoints.openai.protocol.responses import FunctionCall, ToolCallMessage
from quire.errors import ValidationError

OLD_NAMES = (
    (r"tools\.(\d+)\.function", r"functions.\1"),
    (r"\btools\b", "functions"),
    ("tool_choice", "function_call"),
)


def translate(request: ChatCompletionRequest) -> None:
    """Let the functions of a request be its tools.

    Raises:
        ValidationError: it has both, or calls for a function and has none.
    """
    choice = request.function_call
    if not request.functions:
        if choice not in (None, "none", "auto"):
            raise ValidationError("function_call needs functions", param="function_call")
        return
    if request.tools or request.tool_choice is not None:
        raise ValidationError(
            "functions cannot be sent together with tools or tool_choice", param="functions"
        )
    functions = enumerate(request.functions)
    request.show_tools([Tool.shown(function, f"tools.{index}.function") for index, function in functions])
    request.tool_choice = _tool_choice(choice)
    request.parallel_tool_calls = False


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        if choice.keys() != {"name"} or not isinstance(choice["name"], str):
            raise ValidationError(
                "function_call must be auto, none or an object with a name", param="function_call"
            )
        return {"type": "function", "function": choice}
    if choice not in (None, "none", "auto"):
        raise ValidationError(
            "function_call must be auto, none or an object with a name", param="function_call"
        )
    return choice


@contextmanager
def old_names(request: ChatCompletionRequest) -> Iterator[None]:
    """Errors about tools are about functions, if these are what was sent."""
    try:
        yield
    except ValidationError as error:
        if not request.functions:
            raise
        raise type(error)(_old(error.message), param=_old(error.param or "") or None) from None


def _old(text: str) -> str:
    for new, old in OLD_NAMES:
        text = re.sub(new, old, text)
    return text


def function_call(calls: Sequence[ToolCallMessage]) -> FunctionCall | UnsetType:
    """The one call, as it was told then."""
    return calls[0].function if calls else UNSET
