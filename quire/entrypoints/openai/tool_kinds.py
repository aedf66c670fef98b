"""Kinds of tools in a chat request, and the functions that the model is shown for them.

Invariant: a tool is a function that the client runs, or text for a tool of the client's (`custom`), which the model
sees as a function of one string. Any other kind runs on servers that this one is not, or has a schema that only its
vendor's models know: it is left out and named in `ignored`, since a model that never calls it gives a valid answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.chat.call_arguments import CUSTOM_INPUT
from quire.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    ChatFields,
    CustomTool,
    OfferedTool,
    Tool,
    ToolFunction,
)
from quire.errors import ValidationError

ALLOWED_MODES = ("auto", "required")
INPUT_SCHEMA = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}


def settle_tools(request: ChatFields) -> None:
    """Find the functions to show to the model, and bring `tool_choice` into the form that names one of them.

    Raises:
        ValidationError: a tool lacks its description, or the choice is of no known form or names no tool.
    """
    tools: list[Tool] = []
    left_out: list[str] = []
    for index, offered in enumerate(request.tools or []):
        tool = _shown(offered, f"tools.{index}")
        if tool is not None:
            tools.append(tool)
            continue
        request.notes.ignore(f"tools[].{offered.type}")
        left_out.append(offered.type)
    request.show_tools(tools, left_out)
    if isinstance(request, ChatCompletionRequest) and isinstance(request.tool_choice, dict):
        _settle_choice(request, request.tool_choice)


def custom_function(name: str, description: str | None, form: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the function that stands for a custom tool. Its grammar is shown to the model, and not enforced."""
    grammar = grammar_of(form)
    told = [description or ""]
    if grammar is not None:
        told.append(
            f"{CUSTOM_INPUT} follows this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
        )
    text = "\n\n".join(filter(None, told))
    return {"name": name, "parameters": INPUT_SCHEMA, **({"description": text} if text else {})}


def grammar_of(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the grammar of a custom tool's format: beside its type in Responses, and one level down in chat."""
    grammar = None if form is None else form.get("grammar", form)
    is_one = isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str)
    return grammar if is_one else None


def _shown(tool: OfferedTool, where: str) -> Tool | None:
    """Return the tool as a function, or None if this server has nothing of its kind."""
    if tool.type == "function":
        if tool.function is None:
            raise ValidationError(f"{where}.function is required", param=f"{where}.function")
        return Tool.shown(tool.function, f"{where}.function")
    if tool.type == "custom":
        if tool.custom is None:
            raise ValidationError(f"{where}.custom is required", param=f"{where}.custom")
        return Tool.shown(_function_of(tool.custom), f"{where}.custom", is_custom=True)
    return None


def _function_of(tool: CustomTool) -> ToolFunction:
    return ToolFunction(**custom_function(tool.name, tool.description, tool.format))


def _settle_choice(request: ChatCompletionRequest, choice: Mapping[str, Any]) -> None:
    kind = _kind_of(choice)
    if not request.tools:
        raise ValidationError("tool_choice needs tools", param="tool_choice")
    if kind == "allowed_tools":
        _allow(request, choice if choice.get("allowed_tools") is None else choice["allowed_tools"])
    elif kind in ("function", "custom"):
        named = choice if choice.get(kind) is None else choice[kind]
        request.tool_choice = {"type": "function", "function": named}
    else:
        raise ValidationError(
            f"tool_choice names the tool {kind!r:.80}, which this server has not; name a function, or send auto",
            param="tool_choice",
        )


def _allow(request: ChatCompletionRequest, allowed: Any) -> None:
    """Show the model the allowed tools alone, and let the mode be the choice.

    Raises:
        ValidationError: the form is wrong, or a name is no tool's.
    """
    entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValidationError("tool_choice must have a list of tools that are allowed", param="tool_choice")
    mode = "auto" if allowed.get("mode") is None else allowed["mode"]
    if mode not in ALLOWED_MODES:
        raise ValidationError(
            f"the mode of tool_choice must be auto or required, got {mode!r:.40}", param="tool_choice"
        )
    known, names, left_out = (
        {tool.function.name for tool in request.shown_tools},
        set(),
        list(request.left_out),
    )
    for entry in entries:
        name = _name_of(entry)
        if name is None:
            kind = _kind_of(entry)
            request.notes.ignore(f"tool_choice.tools[].{kind}")
            left_out.append(kind)
        elif name not in known:
            raise ValidationError(
                f"tool_choice allows the tool {name!r:.200}, and no tool has this name", param="tool_choice"
            )
        else:
            names.add(name)
    request.show_tools([tool for tool in request.shown_tools if tool.function.name in names], left_out)
    request.tool_choice = mode


def _name_of(entry: Mapping[str, Any]) -> str | None:
    """Return the name of a function or custom tool, which is one level down in chat; None for tools of other kinds."""
    kind = _kind_of(entry)
    if kind not in ("function", "custom"):
        return None
    inner = entry if entry.get(kind) is None else entry[kind]
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise ValidationError("a tool that tool_choice allows must have a name", param="tool_choice")
    return name


def _kind_of(choice: Mapping[str, Any]) -> str:
    kind = choice.get("type")
    if not isinstance(kind, str | None) or kind == "":
        raise ValidationError(
            "the type of tool_choice, and of what it allows, must be text", param="tool_choice"
        )
    return "function" if kind is None else kind
