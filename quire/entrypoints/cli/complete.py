"""`quire complete`: let a running server continue a text."""

from __future__ import annotations

from typing import Any

import click

from quire.entrypoints.cli.client import Event
from quire.entrypoints.cli.conversation import connect, each_line, server_options
from quire.entrypoints.cli.form import form_options, structured_outputs
from quire.entrypoints.cli.values import HumanInt


class PrintedText:
    """Prints the text that each chunk of a completion adds."""

    def take(self, event: Event) -> None:
        click.echo("".join(choice["text"] for choice in event.get("choices", [])), nl=False)

    def end(self) -> None:
        click.echo()


@click.command()
@server_options
@form_options
@click.option("--max-tokens", type=HumanInt(), help="Most tokens to generate; default: the server's.")
def complete(quick: str | None, max_tokens: int | None, **server: Any) -> None:
    """Continue texts with a model of a running server."""
    form = structured_outputs(server)
    conversation = connect(**server)
    limits: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    if form is not None:
        limits["structured_outputs"] = form

    def answer(prompt: str) -> None:
        conversation.say("/completions", {"prompt": prompt, **limits}, PrintedText())

    if quick is not None:
        answer(quick)
        return
    click.echo("Type the start of a text; Ctrl-D ends.", err=True)
    each_line("> ", answer)
