"""Whether a chat request may be answered with tool calls."""

from __future__ import annotations

from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
from quire.entrypoints.openai.state import ServerState
from quire.errors import ValidationError


def tools_in_use(server: ServerState, request: ChatCompletionRequest) -> bool:
    """True if the model is shown the tools and its text is searched for calls.

    Raises:
        ValidationError: the choice is unknown or not supported, or the server has no tool-call parser.
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
        return False
    if server.make_tool_parser is None:
        raise ValidationError(
            "this server has no parser for the model's tool calls; it is chosen with --tool-call-parser",
            param="tools",
        )
    return True
