"""`quire chat`: talk to a running server."""

from __future__ import annotations

from typing import Any

import click

from quire.entrypoints.cli.client import Event
from quire.entrypoints.cli.conversation import Conversation, connect, each_line, server_options
from quire.entrypoints.cli.form import form_options, structured_outputs


class ChatLog:
    """The messages so far; a turn that fails leaves them as they were."""

    def __init__(
        self, conversation: Conversation, system_prompt: str | None, form: dict[str, Any] | None = None
    ) -> None:
        self._conversation = conversation
        self._form = {} if form is None else {"structured_outputs": form}
        self.messages = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def turn(self, content: str) -> None:
        """Send a user message, print the answer and keep both."""
        messages = [*self.messages, {"role": "user", "content": content}]
        answer = self._conversation.say(
            "/chat/completions", {"messages": messages, **self._form}, delta_content
        )
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def delta_content(event: Event) -> str:
    """The text that a chat completion chunk adds."""
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))


@click.command()
@server_options
@form_options
@click.option("--system-prompt", help="System message that starts the conversation.")
def chat(quick: str | None, system_prompt: str | None, **server: Any) -> None:
    """Chat with a model of a running server."""
    form = structured_outputs(server)
    log = ChatLog(connect(**server), system_prompt, form)
    if quick is not None:
        log.turn(quick)
        return
    click.echo("Type a message; Ctrl-D ends.", err=True)
    each_line("> ", log.turn)
