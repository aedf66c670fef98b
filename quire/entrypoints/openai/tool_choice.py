"""Whether a chat request may, or must, be answered with tool calls, and the grammar that sees to it."""

from __future__ import annotations

from typing import Any

from quire.entrypoints.chat.formats.events import Tools
from quire.entrypoints.chat.tool_grammar import CALL_FORMATS, CallFormat, calls_in_text, calls_only
from quire.entrypoints.chat.tool_schemas import tool_schemas
from quire.entrypoints.openai.protocol.constraints import as_format, constraint_of
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, Tool, ToolFunction
from quire.entrypoints.openai.state import ServerState
from quire.errors import ValidationError
from quire.structured_output.params import StructuredOutputsParams

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tools_in_use(server: ServerState, request: ChatCompletionRequest) -> Tools | None:
    """The tools that the model is shown, and whose calls are looked for in its answer; None if there are none.

    Raises:
        ValidationError: the choice is unknown or names no tool, the tools are wrong, or the server does not know how
            the model writes calls.
    """
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        _required_tools(request)
    if not request.tools or choice == "none":
        return None
    if len(request.tools) > server.config.max_tools:
        limit = f"the limit is {server.config.max_tools}"
        raise ValidationError(f"tools has {len(request.tools)} tools, {limit}", param="tools")
    tools = tool_schemas([tool.model_dump() for tool in request.tools])
    if server.answer_format.formats.tools is None:
        raise ValidationError(
            "this server does not know how the model writes tool calls; --tool-call-parser says it",
            param="tools",
        )
    return tools


def tool_constraint(
    server: ServerState, request: ChatCompletionRequest, tools: Tools | None
) -> StructuredOutputsParams | None:
    """What the text must be: calls if they are asked for, else what the request says, or calls of its strict tools.

    Raises:
        ValidationError: the constraint has no valid form, or the format of calls has no grammar.
    """
    wanted = constraint_of(request)
    if tools is None:
        return wanted
    must_call = request.tool_choice not in (None, "auto")
    if not must_call and wanted is None and not any(tool.function.strict for tool in request.tools or []):
        return None
    return StructuredOutputsParams(structural_tag=_tag(_format(server), request, wanted, must_call=must_call))


def _tag(
    calls: CallFormat,
    request: ChatCompletionRequest,
    wanted: StructuredOutputsParams | None,
    *,
    must_call: bool,
) -> dict[str, Any]:
    is_named = isinstance(request.tool_choice, dict)
    at_most_one = is_named or not request.parallel_tool_calls
    if must_call:
        functions = [(tool.function.name, _arguments(tool.function)) for tool in _required_tools(request)]
        return calls_only(calls, functions, at_most_one=at_most_one)
    functions = [
        (tool.function.name, _arguments(tool.function) if tool.function.strict else ANY_OBJECT)
        for tool in request.tools or []
    ]
    if wanted is None:
        return calls_in_text(calls, functions, at_most_one=at_most_one)
    return {
        "type": "or",
        "elements": [as_format(wanted), calls_only(calls, functions, at_most_one=at_most_one)],
    }


def _arguments(function: ToolFunction) -> dict[str, Any]:
    """The schema of a call's arguments; `strict: false` asks for no more than an object."""
    if function.strict is False or function.parameters is None:
        return ANY_OBJECT
    return {"type": "object", **function.parameters}


def _required_tools(request: ChatCompletionRequest) -> list[Tool]:
    """Those of which one must be called."""
    choice, tools = request.tool_choice, request.tools or []
    if choice == "required" and tools:
        return tools
    if not isinstance(choice, dict):
        what = "needs tools" if choice == "required" else "must be none, auto, required or name a function"
        raise ValidationError(f"tool_choice {what}", param="tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise ValidationError(
            f"tool_choice names the function {name!r:.200}, and no tool does", param="tool_choice"
        )
    return named


def _format(server: ServerState) -> CallFormat:
    formats = server.answer_format.formats.tools
    if formats is None or formats.name not in CALL_FORMATS:
        raise ValidationError(
            "the format of this model's tool calls has no grammar, so calls cannot be required; send tool_choice auto",
            param="tool_choice",
        )
    return CALL_FORMATS[formats.name]
