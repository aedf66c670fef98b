"""What `chat` and `complete` share: their flags, the stream printed as it comes, and its timings."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import click

from quire.entrypoints.cli.client import Event, ServerClient, carries_tokens
from quire.errors import NotFoundError, QuireError


class Answer(Protocol):
    """What shows an answer as it comes."""

    def take(self, event: Event) -> None: ...

    def end(self) -> None:
        """It is complete."""
        ...


@dataclass
class StreamTimings:
    """When the tokens of one answer arrived, in seconds."""

    clock: Callable[[], float] = time.perf_counter
    num_tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    _start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    def record(self, event: Event) -> None:
        """Note the arrival of an event; its usage, where it has one, replaces the count of events."""
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
    """A server, one of its models, and how to print what it says."""

    def __init__(self, client: ServerClient, model: str | None, stats: bool) -> None:
        self._client = client
        self.model = model or asyncio.run(first_model(client))
        self._stats = stats

    def say(self, path: str, request: dict[str, Any], answer: Answer) -> None:
        """Send a request, and give the answer each event as it comes."""
        asyncio.run(self._say(path, request, answer))

    async def _say(self, path: str, request: dict[str, Any], answer: Answer) -> None:
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
    """The flags that name a server, a model and a way of printing."""
    options = [
        click.option("--url", default="http://localhost:8000/v1", show_default=True, help="Base of its API."),
        click.option("--model-name", help="Model to ask for; default: the server's first."),
        click.option("--api-key", help="Bearer token; default: QUIRE_API_KEY or OPENAI_API_KEY."),
        click.option("-q", "--quick", metavar="TEXT", help="Send this one text, print the answer and end."),
        click.option("--stats", is_flag=True, help="Print tokens and timings after each answer."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def connect(url: str, model_name: str | None, api_key: str | None, stats: bool) -> Conversation:
    """Find the server and its model; raises what `ServerClient` raises."""
    return Conversation(ServerClient(url, bearer_token(api_key)), model_name, stats)


def bearer_token(flag: str | None) -> str | None:
    """The key that `--api-key` or the environment gives."""
    return flag or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")


async def first_model(client: ServerClient, path: str = "/models") -> str:
    """The name under which the server offers its first model."""
    models = (await client.get(path)).get("data") or []
    if not models:
        raise NotFoundError(f"{client.base_url} serves no model")
    return str(models[0]["id"])


def each_line(prompt: str, answer: Callable[[str], None]) -> None:
    """Answer the lines that the user types until end of input; a failed answer does not end the loop."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            click.echo()
            return
        if line.strip():
            try:
                answer(line)
            except QuireError as error:
                click.echo(f"Error: {error}", err=True)
