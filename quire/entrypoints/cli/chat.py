# SPDX-License-Identifier: Apache-2.0
"""`quire chat` and `quire complete`: clients of a running server that print streamed answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import click

from quire.entrypoints.cli.client import (
    AnswerPrinter,
    Event,
    ServerClient,
    carries_tokens,
    enable_line_editing,
)
from quire.entrypoints.cli.options import HumanInt, constraint_options, structured_outputs
from quire.entrypoints.cli.run import LocalTools, find_functions
from quire.errors import EngineError, NotFoundError, QuireError

# Names of the reasoning field; quire sends both with the same text.
THOUGHTS = ("reasoning", "reasoning_content")
MAX_ROUNDS = 32  # Limit of rounds of calls and results in one turn: a model may never answer.


class AnswerDisplay(Protocol):
    """Display of a streamed answer."""

    def take(self, event: Event) -> None: ...

    def end(self) -> None:
        """Finish the display of a complete answer."""
        ...


@dataclass
class StreamTimings:
    """Arrival times of one answer's tokens, in seconds."""

    clock: Callable[[], float] = time.perf_counter
    num_tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    _start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    def record(self, event: Event) -> None:
        """Record the arrival of an event; its usage, if present, replaces the count of events."""
        self.total_s = self.clock() - self._start_s
        if carries_tokens(event):
            self.first_s = self.total_s if self.first_s is None else self.first_s
            self.num_tokens += 1
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]

    def __str__(self) -> str:
        rest_s = self.total_s - (self.first_s or 0.0)
        rate = (self.num_tokens - 1) / rest_s if self.num_tokens > 1 and rest_s > 0 else 0.0
        first_ms = 1000 * (self.first_s or 0.0)
        speed = f"first after {first_ms:.0f} ms, then {rate:.1f} tokens/s"
        return f"[{self.num_tokens} tokens in {self.total_s:.2f} s: {speed}]"


class Conversation:
    """A server, one of its models, and the display options."""

    def __init__(self, client: ServerClient, model: str | None, stats: bool) -> None:
        self._client = client
        self.model = model or asyncio.run(first_model(client))
        self._stats = stats

    def say(self, path: str, request: dict[str, Any], answer: AnswerDisplay) -> None:
        """Send a request, and pass each event of the answer on."""
        asyncio.run(self._say(path, request, answer))

    async def _say(self, path: str, request: dict[str, Any], answer: AnswerDisplay) -> None:
        request = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **request}
        timings = StreamTimings()
        async with aclosing(self._client.stream(path, request)) as events:
            async for event in events:
                timings.record(event)
                answer.take(event)
        answer.end()
        if self._stats:
            click.echo(str(timings), err=True)


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of server, model and display."""
    options = [
        click.option(
            "--url",
            default="http://localhost:8000/v1",
            show_default=True,
            help="Base URL of the API.",
        ),
        click.option("--model-name", help="Model to ask for; default: the server's first."),
        click.option("--api-key", help="Bearer token; default: QUIRE_API_KEY or OPENAI_API_KEY."),
        click.option("-q", "--quick", metavar="TEXT", help="Send this one text, print the answer and exit."),
        click.option("--stats", is_flag=True, help="Print tokens and timings after each answer."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def connect(url: str, model_name: str | None, api_key: str | None, stats: bool) -> Conversation:
    """Connect to the server and find its model; raises what `ServerClient` raises."""
    return Conversation(ServerClient(url, bearer_token(api_key)), model_name, stats)


def bearer_token(flag: str | None) -> str | None:
    """Return the key from `--api-key` or the environment."""
    return flag or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")


async def first_model(client: ServerClient, path: str = "/models") -> str:
    """Return the name of the server's first model."""
    models = (await client.get(path)).get("data") or []
    if not models:
        raise NotFoundError(f"{client.base_url} serves no model")
    return str(models[0]["id"])


def each_line(prompt: str, answer: Callable[[str], None]) -> None:
    """Answer each input line until end of input; an answer that fails, or that Ctrl-C ends, does not end the loop."""
    enable_line_editing()
    while True:
        try:
            line = input(prompt)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\nCtrl-D ends the chat", err=True)
            continue
        if line.strip():
            try:
                answer(line)
            except QuireError as error:
                click.echo(f"error: {error}", err=True)
            except KeyboardInterrupt:
                click.echo("\ninterrupted; the message is not kept", err=True)


class PrintedText:
    """Prints the text of each completion chunk."""

    def take(self, event: Event) -> None:
        click.echo("".join(choice["text"] for choice in event.get("choices", [])), nl=False)

    def end(self) -> None:
        click.echo()


@click.command()
@server_options
@constraint_options
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


class ChatMessagePrinter:
    """Collects and prints the chunks of a chat message."""

    def __init__(self) -> None:
        self._printer = AnswerPrinter()
        self._texts: dict[str, list[str]] = {"content": [], **{name: [] for name in THOUGHTS}}
        self.tool_calls: list[dict[str, Any]] = []

    def take(self, event: Event) -> None:
        for choice in event.get("choices", []):
            delta = choice["delta"]
            for name, texts in self._texts.items():
                texts.append(delta.get(name) or "")
            self._printer.thought(next((delta[name] for name in THOUGHTS if delta.get(name)), ""))
            self._printer.said(delta.get("content") or "")
            for piece in delta.get("tool_calls") or []:
                self._add_call(piece)

    def end(self) -> None:
        """Finish the display after the last chunk."""
        if any(self._text(name) for name in self._texts) or not self.tool_calls:
            self._printer.end()

    def as_sent(self) -> dict[str, Any]:
        """Return the message for the conversation; reasoning keeps the server's field name."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text("content")}
        thought = next((name for name in THOUGHTS if self._text(name)), None)
        if thought is not None:
            message[thought] = self._text(thought)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def _text(self, name: str) -> str:
        return "".join(self._texts[name])

    def _add_call(self, piece: dict[str, Any]) -> None:
        """Add a piece of a call; pieces of one call share its index, and the first has its name."""
        index = piece.get("index", len(self.tool_calls))
        while len(self.tool_calls) <= index:
            function = {"name": "", "arguments": ""}
            self.tool_calls.append({"id": "", "type": "function", "function": function})
        call, added = self.tool_calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += added.get("name") or ""
        call["function"]["arguments"] += added.get("arguments") or ""


class ChatLog:
    """The messages so far; unchanged by a turn that fails."""

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
        """Send a user message, print the answer, and run called tools until there are none; then keep all messages."""
        messages = [*self.messages, {"role": "user", "content": content}]
        for _ in range(MAX_ROUNDS):
            answer = self._answer(messages)
            messages.append(answer.as_sent())
            if not answer.tool_calls:
                self.messages = messages
                return
            messages += [self._tools.answer(call) for call in answer.tool_calls]
        raise EngineError(f"the model still calls tools after {MAX_ROUNDS} rounds of tool calls")

    def _answer(self, messages: list[dict[str, Any]]) -> ChatMessagePrinter:
        answer = ChatMessagePrinter()
        tools = {"tools": self._tools.described} if self._tools.described else {}
        self._conversation.say("/chat/completions", {"messages": messages, **tools, **self._form}, answer)
        return answer


def allow(call: str) -> bool:
    """Ask for permission on the terminal; without a terminal it is denied."""
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
@constraint_options
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
