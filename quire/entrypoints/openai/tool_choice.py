"""Whether a chat request may, or must, be answered with tool calls, and the grammar that sees to it."""

from __future__ import annotations

from quire.entrypoints.chat.answer_grammar import Calls
from quire.entrypoints.chat.formats.events import Tools
from quire.entrypoints.chat.formats.format import ToolFormat
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.tool_grammar import Function, is_enforceable
from quire.entrypoints.chat.tool_schemas import check_names, tool_schemas
from quire.entrypoints.openai.protocol.constraints import constraint_of
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, Tool
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.structural_tag import as_format, as_tag


def tools_in_use(server: ServerState, form: TextForm, request: ChatCompletionRequest) -> Tools | None:
    """The tools that the model is shown, and whose calls are looked for in its answer; None if there are none.

    Raises:
        ValidationError: the choice is unknown or names no tool, the tools are wrong, the model's format of calls has no
            way to write the name of one, or the server does not know the format.
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
    tool_format = form.answer_format.formats.tools
    if tool_format is None:
        raise ValidationError(
            "this server does not know how the model writes tool calls; --tool-call-parser says it",
            param="tools",
        )
    check_names(tools, tool_format)
    return tools


def tool_constraint(
    form: TextForm, request: ChatCompletionRequest, tools: Tools | None, begin: PromptEnd
) -> StructuredOutputsParams | None:
    """What an answer that begins there must be: calls if they are asked for, or what the request says of its text, or
    text with calls of its strict tools.

    Raises:
        ValidationError: the constraint has no valid form, or cannot be enforced.
    """
    wanted = constraint_of(request)
    must_call = request.tool_choice not in (None, "auto")
    is_strict = any(tool.function.strict for tool in request.tools or [])
    if tools is None or not (must_call or wanted or is_strict):
        return form.answer_format.text_constraint(wanted, begin)
    grammar, calls = form.answer_format.grammar(begin), _calls(form, request, must_call=must_call)
    if must_call:
        return as_tag(grammar.calls(calls), wanted)
    if wanted is None:
        return as_tag(grammar.calls_in_text(calls))
    return as_tag(grammar.text_or_calls(as_format(wanted), calls), wanted)


def _calls(form: TextForm, request: ChatCompletionRequest, *, must_call: bool) -> Calls:
    at_most_one = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls
    if not must_call:
        functions = [
            _function(index, tool, strict=tool.function.strict is True)
            for index, tool in enumerate(request.tools or [])
        ]
        return Calls(functions, at_most_one)
    row = form.answer_format.formats.tools
    assert row is not None, "`tools_in_use` has looked for it"
    functions = [
        _required(row, _function(index, tool, strict=True), is_lenient=tool.function.strict is False)
        for index, tool in _required_tools(request)
    ]
    return Calls(functions, at_most_one)


def _function(index: int, tool: Tool, *, strict: bool) -> Function:
    field = f"tools.{index}.function.parameters"
    return Function(tool.function.name, tool.function.parameters or {}, strict, field)


def _required(calls: ToolFormat, function: Function, *, is_lenient: bool) -> Function:
    """A function whose call is asked for. "strict": false asks for no more of its schema than can be enforced."""
    return function._replace(strict=not is_lenient or is_enforceable(calls, function))


def _required_tools(request: ChatCompletionRequest) -> list[tuple[int, Tool]]:
    """Those of which one must be called, each with its place in the request."""
    choice, tools = request.tool_choice, list(enumerate(request.tools or []))
    if choice == "required" and tools:
        return tools
    if not isinstance(choice, dict):
        what = "needs tools" if choice == "required" else "must be none, auto, required or name a function"
        raise ValidationError(f"tool_choice {what}", param="tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [(index, tool) for index, tool in tools if tool.function.name == name]
    if not named:
        raise ValidationError(
            f"tool_choice names the function {name!r:.200}, and no tool does", param="tool_choice"
        )
    return named
