"""Whether a chat request may be answered with tool calls."""

from __future__ import annotations

from quire.entrypoints.chat.formats.events import Tools
from quire.entrypoints.chat.tool_schemas import tool_schemas
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
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
