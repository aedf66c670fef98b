"""Whether a chat request may be answered with tool calls."""

from __future__ import annotations

from quire.entrypoints.chat.formats.events import Tools
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, Tool
from quire.entrypoints.openai.state import ServerState
from quire.errors import ValidationError


def tools_in_use(server: ServerState, request: ChatCompletionRequest) -> Tools | None:
    """The tools that the model is shown, and whose calls are looked for in its answer; None if there are none.

    Raises:
        ValidationError: the choice is unknown or not supported, the tools are wrong, or the server does not know how
            the model writes calls.
    """
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        what = (
            choice
            if choice == "required"
            else "a named function"
            if isinstance(choice, dict)
            else "this value"
        )
        raise ValidationError(
            f"tool_choice: {what} is not supported yet; send auto or none", param="tool_choice"
        )
    if not request.tools or choice == "none":
        return None
    tools = checked_tools(request.tools, server.config.max_tools)
    if server.answer_format.formats.tools is None:
        raise ValidationError(
            "this server does not know how the model writes tool calls; --tool-call-parser says it",
            param="tools",
        )
    return tools


def checked_tools(tools: list[Tool], max_tools: int) -> Tools:
    """Name -> schema of the arguments.

    Raises:
        ValidationError: there are too many, two have one name, or the arguments of one are no object.
    """
    if len(tools) > max_tools:
        raise ValidationError(f"tools has {len(tools)} tools, the limit is {max_tools}", param="tools")
    schemas: dict[str, dict[str, object]] = {}
    for index, tool in enumerate(tools):
        where, function = f"tools.{index}.function", tool.function
        if function.name in schemas:
            raise ValidationError(
                f"{where}.name {function.name!r:.80} is another tool's, too", param=f"{where}.name"
            )
        schema = function.parameters or {}
        if schema.get("type", "object") != "object":
            raise ValidationError(
                f"{where}.parameters must be the schema of an object, got type {schema['type']!r:.40}",
                param=f"{where}.parameters",
            )
        schemas[function.name] = schema
    return schemas
