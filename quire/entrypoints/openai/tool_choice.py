"""Whether a chat request may, or must, be answered with tool calls, and the grammar that sees to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Container, Iterable
from collections.abc import Set as AbstractSet

from quire.entrypoints.chat.answer_grammar import Calls
from quire.entrypoints.chat.formats.events import Tools
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.tool_grammar import Function, is_enforceable
from quire.entrypoints.chat.tool_schemas import check_names, tool_schemas
from quire.entrypoints.openai.chat_prompt import ChatPrompt
from quire.entrypoints.openai.protocol.constraints import constraint_of
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, Tool
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.sampling_params import SamplingParams
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.structural_tag import as_format, as_tag

INDEX = re.compile(r"\.(\d+)")
MAX_CHECKS = 4
"""Of a request's tools together: each may find one tool at fault; after the last no lenient one is constrained."""


def tools_in_use(server: ServerState, form: TextForm, request: ChatCompletionRequest) -> Tools | None:
    """The tools that the model is shown, and whose calls are looked for in its answer; None if there are none.

    Raises:
        ValidationError: the choice is unknown or names no tool, the tools are wrong, the model's format of calls has no
            way to write the name of one, or the server does not know the format.
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
            "this server does not know how the model writes tool calls; --tool-call-parser says it",
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

    A tool that is not `strict` keeps its request's answer though its schema cannot be enforced: then calls of it may
    have any arguments, and the reply says so.

    Raises:
        ValidationError: the constraint has no valid form, or cannot be enforced.
        UnavailableError: others keep the checkers of constraints busy.
    """
    lenient = _lenient_tools(request, tools)
    loose = await asyncio.to_thread(_unenforceable, form, request, lenient) if lenient else set()
    left, num_checks = lenient - loose, 0
    while True:
        constraint = tool_constraint(form, request, tools, chat.end, loose)
        wanted = params.settled(structured_outputs=constraint)
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
    """Return the places of tools whose call is asked for and that may lose their constraint."""
    if tools is None or request.tool_choice in (None, "auto"):
        return set()
    return {index for index, tool in _required_tools(request) if tool.function.strict is not True}


def _unenforceable(form: TextForm, request: ChatCompletionRequest, lenient: Iterable[int]) -> set[int]:
    """Find the tools whose schemas cannot be enforced, as far as that is known without compiling them."""
    row, tools = form.answer_format.formats.tools, request.shown_tools
    assert row is not None, "`tools_in_use` has looked for it"
    return {index for index in lenient if not is_enforceable(row, _function(tools[index], strict=True))}


def _at_fault(
    error: ValidationError, request: ChatCompletionRequest, left: AbstractSet[int]
) -> AbstractSet[int]:
    """Find the tool that an error is about: all that are left if it names none, as for the size of all together."""
    named = {index for index in left if error.param == _schema_field(request.shown_tools[index])}
    return named or left


def _note_loose(request: ChatCompletionRequest, loose: Iterable[int]) -> None:
    """Note the tools whose schema is not enforced although their request did not allow that."""
    for tool in (request.shown_tools[index] for index in sorted(loose)):
        if tool.function.strict is None:
            request.notes.adjust(f"{_place_for_client(request, tool)}.strict", False)


def _place_for_client(request: ChatCompletionRequest, tool: Tool) -> str:
    """Return a function's place in the client's own request, such as `tools[2].function`."""
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
    """What an answer that begins there must be: calls if they are asked for, or what the request says of its text, or
    text with calls of its strict tools.

    Args:
        loose: places of tools whose schema is not enforced; None: to be found out.

    Raises:
        ValidationError: the constraint has no valid form, or cannot be enforced.
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


def _calls(request: ChatCompletionRequest, loose: Container[int], *, must_call: bool) -> Calls:
    at_most_one = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls
    tools = _required_tools(request) if must_call else list(enumerate(request.shown_tools))
    functions = [
        _function(tool, strict=index not in loose if must_call else tool.function.strict is True)
        for index, tool in tools
    ]
    return Calls(functions, at_most_one)


def _function(tool: Tool, *, strict: bool) -> Function:
    return Function(tool.function.name, tool.function.parameters or {}, strict, _schema_field(tool))


def _schema_field(tool: Tool) -> str:
    return f"{tool.place}.parameters"


def _required_tools(request: ChatCompletionRequest) -> list[tuple[int, Tool]]:
    """Those of which one must be called, each with its place in the request."""
    choice, tools = request.tool_choice, list(enumerate(request.shown_tools))
    if choice == "required" and tools:
        return tools
    if not isinstance(choice, dict):
        what = (
            _needs_tools(request)
            if choice == "required"
            else "must be none, auto, required or name a function"
        )
        raise ValidationError(f"tool_choice {what}", param="tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [(index, tool) for index, tool in tools if tool.function.name == name]
    if not named:
        raise ValidationError(
            f"tool_choice names the function {name!r:.200}, and no tool does", param="tool_choice"
        )
    return named


def _needs_tools(request: ChatCompletionRequest) -> str:
    if not request.left_out:
        return "needs tools"
    kinds = ", ".join(dict.fromkeys(request.left_out))
    return f"is required, but this server has none of the tools ({kinds:.200}); send auto, or a function"
