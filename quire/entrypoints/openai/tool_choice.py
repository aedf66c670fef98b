# SPDX-License-Identifier: Apache-2.0
"""Tools of a chat request: which functions the model is shown, and the grammar that enforces tool calls.

Invariant: a tool is a function that the client runs, or a `custom` tool with text input, which the model sees as a
function of one string. Other types run on the vendor's servers, or have schemas that only the vendor's models know.
They are ignored and named in `ignored`: a model that never calls them still gives a valid answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from quire.entrypoints.chat.call_arguments import CUSTOM_INPUT
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.formats.scanning import Tools
from quire.entrypoints.chat.tool_grammar import AllowedCalls, AllowedFunction, is_enforceable
from quire.entrypoints.chat.tool_schemas import check_names, tool_schemas
from quire.entrypoints.openai.chat_prompt import ChatPrompt
from quire.entrypoints.openai.protocol.constraints import constraint_of
from quire.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    ChatFields,
    CustomTool,
    OfferedTool,
    Tool,
    ToolFunction,
)
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.json_schema.structural_tag import as_format, as_tag
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams

ALLOWED_MODES = ("auto", "required")
INPUT_SCHEMA = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}

INDEX = re.compile(r"\.(\d+)")
# Attempts to check a request's tools together: each finds one tool at fault. Then no lenient one is constrained.
MAX_CHECKS = 4


def resolve_tools(request: ChatFields) -> None:
    """Collect the functions to show to the model, and normalize `tool_choice` to one that names a function.

    Raises:
        ValidationError: a tool is incomplete, or the choice is malformed or names no tool.
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
    if isinstance(request, ChatCompletionRequest) and request.tool_choice == "any":  # Mistral's name
        request.tool_choice = "required"
    if isinstance(request, ChatCompletionRequest) and isinstance(request.tool_choice, dict):
        _normalize_choice(request, request.tool_choice)


def custom_function(name: str, description: str | None, form: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the function that stands for a custom tool. Its grammar is shown to the model but not enforced."""
    grammar = grammar_of(form)
    texts = [description or ""]
    if grammar is not None:
        texts.append(
            f"{CUSTOM_INPUT} follows this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
        )
    text = "\n\n".join(filter(None, texts))
    return {"name": name, "parameters": INPUT_SCHEMA, **({"description": text} if text else {})}


def grammar_of(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the grammar of a custom tool's format: beside its type in Responses, one level down in chat."""
    grammar = None if form is None else form.get("grammar", form)
    is_one = isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str)
    return grammar if is_one else None


def _shown(tool: OfferedTool, where: str) -> Tool | None:
    """Return the tool as a function, or None if its type is not supported."""
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


def _normalize_choice(request: ChatCompletionRequest, choice: Mapping[str, Any]) -> None:
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
            f"tool_choice names the tool {kind!r:.80}, which is not supported; name a function, or send auto",
            param="tool_choice",
        )


def _allow(request: ChatCompletionRequest, allowed: Any) -> None:
    """Show the allowed tools only, and use the mode as the choice.

    Raises:
        ValidationError: the choice is malformed, or names no tool.
    """
    entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValidationError("tool_choice must have a list of allowed tools", param="tool_choice")
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
    """Return the name of a function or custom tool, one level down in chat; None for other types."""
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
            "the types of tool_choice and its allowed tools must be text", param="tool_choice"
        )
    return "function" if kind is None else kind


def tools_in_use(server: ServerState, form: TextForm, request: ChatCompletionRequest) -> Tools | None:
    """Return the tools that the model is shown and may call; None if there are none.

    Raises:
        ValidationError: the choice is unknown or names no tool, a tool is invalid, or the model's call format is
            unknown or cannot express a tool's name.
    """
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        _required_tools(request)
    if not request.shown_tools or choice == "none":
        return None
    if len(request.shown_tools) > server.config.max_tools:
        limit = f"the limit is {server.config.max_tools}"
        raise ValidationError(f"tools has {len(request.shown_tools)} tools, {limit}", param="tools")
    places = [tool.place for tool in request.shown_tools]
    tools = tool_schemas([tool.model_dump() for tool in request.shown_tools], places)
    tool_format = form.answer_format.formats.tools
    if tool_format is None:
        raise ValidationError(
            "the model's tool-call format is unknown; the operator can set it with --tool-call-parser",
            param="tools",
        )
    check_names(tools, tool_format, places)
    return tools


async def constrained(
    server: ServerState,
    form: TextForm,
    request: ChatCompletionRequest,
    tools: Tools | None,
    chat: ChatPrompt,
    params: SamplingParams,
) -> SamplingParams:
    """Add the constraint on the answer (`tool_constraint`) to the sampling parameters.

    If the schema of a tool that is not `strict` cannot be enforced, its calls may have any arguments, and the reply
    notes that.

    Raises:
        ValidationError: the constraint is malformed, or cannot be enforced.
        UnavailableError: the constraint checkers are busy.
    """
    lenient = _lenient_tools(request, tools)
    loose = await asyncio.to_thread(_unenforceable, form, request, lenient) if lenient else set()
    left, num_checks = lenient - loose, 0
    while True:
        constraint = tool_constraint(form, request, tools, chat.end, loose)
        wanted = params.replace_unchecked(structured_outputs=constraint)
        if not left:
            break
        try:
            await server.engine.check_constraint(wanted)
            break
        except ValidationError as error:
            num_checks += 1
            loose |= _at_fault(error, request, left) if num_checks < MAX_CHECKS else left
            left = lenient - loose
    _note_loose(request, loose)
    return wanted


def _lenient_tools(request: ChatCompletionRequest, tools: Tools | None) -> set[int]:
    """Return the indices of tools that must be callable but may lose their constraint."""
    if tools is None or request.tool_choice in (None, "auto"):
        return set()
    return {index for index, tool in _required_tools(request) if tool.function.strict is not True}


def _unenforceable(form: TextForm, request: ChatCompletionRequest, lenient: Iterable[int]) -> set[int]:
    """Return the tools whose schemas cannot be enforced, as far as known without compilation."""
    row, tools = form.answer_format.formats.tools, request.shown_tools
    assert row is not None, "checked by `tools_in_use`"
    return {index for index in lenient if not is_enforceable(row, _function(tools[index], strict=True))}


def _at_fault(
    error: ValidationError, request: ChatCompletionRequest, left: AbstractSet[int]
) -> AbstractSet[int]:
    """Return the tool that an error names, or all that are left, for instance for their total size."""
    named = {index for index in left if error.param == _schema_field(request.shown_tools[index])}
    return named or left


def _note_loose(request: ChatCompletionRequest, loose: Iterable[int]) -> None:
    """Note the tools whose schema is not enforced although the request does not set `strict`."""
    for tool in (request.shown_tools[index] for index in sorted(loose)):
        if tool.function.strict is None:
            request.notes.adjust(f"{_place_for_client(request, tool)}.strict", False)


def _place_for_client(request: ChatCompletionRequest, tool: Tool) -> str:
    """Return a function's path in the client's own request, such as `tools[2].function`."""
    _, index, *_ = tool.place.split(".")
    names = request.notes.names
    place = names.get(tool.place) or names.get("tools.*.function", tool.place).replace("*", index)
    if request.functions:
        place = f"functions.{index}"
    return INDEX.sub(r"[\1]", place)


def tool_constraint(
    form: TextForm,
    request: ChatCompletionRequest,
    tools: Tools | None,
    begin: PromptEnd,
    loose: Container[int] | None = None,
) -> StructuredOutputsParams | None:
    """Return the constraint of an answer that begins in state `begin`: required calls, the request's own constraint, or
    text with calls of strict tools.

    Args:
        loose: indices of tools whose schema is not enforced; None: determined here.

    Raises:
        ValidationError: the constraint is malformed, or cannot be enforced.
    """
    wanted = constraint_of(request)
    must_call = request.tool_choice not in (None, "auto")
    is_strict = any(tool.function.strict for tool in request.shown_tools)
    if tools is None or not (must_call or wanted or is_strict):
        return form.answer_format.text_constraint(wanted, begin)
    if loose is None:
        loose = _unenforceable(form, request, _lenient_tools(request, tools))
    grammar, calls = form.answer_format.grammar(begin), _calls(request, loose, must_call=must_call)
    if must_call:
        return as_tag(grammar.calls(calls), wanted)
    if wanted is None:
        return as_tag(grammar.calls_in_text(calls))
    return as_tag(grammar.text_or_calls(as_format(wanted), calls), wanted)


def _calls(request: ChatCompletionRequest, loose: Container[int], *, must_call: bool) -> AllowedCalls:
    at_most_one = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls
    tools = _required_tools(request) if must_call else list(enumerate(request.shown_tools))
    functions = [
        _function(tool, strict=index not in loose if must_call else tool.function.strict is True)
        for index, tool in tools
    ]
    return AllowedCalls(functions, at_most_one)


def _function(tool: Tool, *, strict: bool) -> AllowedFunction:
    return AllowedFunction(tool.function.name, tool.function.parameters or {}, strict, _schema_field(tool))


def _schema_field(tool: Tool) -> str:
    return f"{tool.place}.parameters"


def _required_tools(request: ChatCompletionRequest) -> list[tuple[int, Tool]]:
    """Return the tools of which one must be called, with their indices."""
    choice, tools = request.tool_choice, list(enumerate(request.shown_tools))
    if choice == "required" and tools:
        return tools
    if not isinstance(choice, dict):
        what = (
            _needs_tools(request)
            if choice == "required"
            else "must be none, auto, required (or any) or name a function"
        )
        raise ValidationError(f"tool_choice {what}", param="tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [(index, tool) for index, tool in tools if tool.function.name == name]
    if not named:
        raise ValidationError(
            f"tool_choice names the function {name!r:.200}, which is not among the tools", param="tool_choice"
        )
    return named


def _needs_tools(request: ChatCompletionRequest) -> str:
    if not request.left_out:
        return "needs tools"
    kinds = ", ".join(dict.fromkeys(request.left_out))
    return f"is required, but none of the tools ({kinds:.200}) is supported; send auto, or a function"
