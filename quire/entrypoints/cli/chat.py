"""`quire chat`: talk to a running server."""

from __future__ import annotations

from typing import Any

import click

from quire.entrypoints.cli.chat_message import ChatMessage
from quire.entrypoints.cli.conversation import Conversation, connect, each_line, server_options
from quire.entrypoints.cli.form import form_options, structured_outputs
from quire.entrypoints.cli.local_tools import LocalTools, find_functions
from quire.errors import EngineError

MAX_ROUNDS = 32
"""Of calls and their results before a turn is given up: a model may never come to an answer."""


class ChatLog:
    """The messages so far; a turn that fails leaves them as they were."""

    def __init__(
        self,
        conversation: Conversation,
        system_prompt: str | None,
        tools: LocalTools,
        form: dict[str, Any] | None = None,
    ) -> None:
        self._conversation = conversation
        self._tools = tools
        self._form = {} if form is None else {"structured_outputs": form}
        self.messages: list[dict[str, Any]] = (
            [{"role": "system", "content": system_prompt}] if system_prompt else []
        )

    def turn(self, content: str) -> None:
        """Send a user message, print the answer, run what it calls, until it calls nothing; keep all of it."""
        messages = [*self.messages, {"role": "user", "content": content}]
        for _ in range(MAX_ROUNDS):
            answer = self._answer(messages)
            messages.append(answer.as_sent())
            if not answer.tool_calls:
                self.messages = messages
                return
            messages += [self._tools.answer(call) for call in answer.tool_calls]
        raise EngineError(f"the model still calls tools after {MAX_ROUNDS} rounds")

    def _answer(self, messages: list[dict[str, Any]]) -> ChatMessage:
        answer = ChatMessage()
        tools = {"tools": self._tools.described} if self._tools.described else {}
        self._conversation.say("/chat/completions", {"messages": messages, **tools, **self._form}, answer)
        return answer


def allow(call: str) -> bool:
    """Ask on the terminal; whoever is not there has not agreed."""
    try:
        return click.confirm(f"The model wants to run {call}. Run it?", default=False, err=True)
    except click.Abort:
        click.echo(err=True)
        return False


def announce(call: str) -> bool:
    click.echo(f"Running {call}", err=True)
    return True


@click.command()
@server_options
@form_options
@click.option("--system-prompt", help="System message that starts the conversation.")
@click.option(
    "--tool",
    "tools",
    multiple=True,
    metavar="NAME",
    help="Python function that the model may call: module:function, file.py:function or file.py; repeatable.",
)
@click.option("--yes", is_flag=True, help="Run the functions that the model calls without asking.")
def chat(
    quick: str | None, system_prompt: str | None, tools: tuple[str, ...], yes: bool, **server: Any
) -> None:
    """Chat with a model of a running server."""
    form = structured_outputs(server)
    functions = LocalTools(find_functions(tools), announce if yes else allow)
    log = ChatLog(connect(**server), system_prompt, functions, form)
    if quick is not None:
        log.turn(quick)
        return
    click.echo("Type a message; Ctrl-D ends.", err=True)
    each_line("> ", log.turn)
