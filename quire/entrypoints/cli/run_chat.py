# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine in this process, printed as they are generated; and the chat of `quire run`.

Invariant: Ctrl-C ends an answer, never the chat; what was generated stays in the conversation. An answer that fails
leaves the conversation as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.config.fields import parse_integer
from quire.entrypoints.chat.formats.examples import examples_of
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.chat.formats.scanning import Event, Reasoning
from quire.entrypoints.chat.formats.selection import PlainReader, choose
from quire.entrypoints.cli.client import AnswerPrinter
from quire.errors import EngineError, QuireError, ValidationError
from quire.inputs import ChatMessage, PromptType
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.vllm_names.row import suggestion

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.chat.media import OfflineMedia

FENCE = '"""'  # Opens and closes a message of several lines.
HELP = f"""\
/set NAME VALUE   set a sampling parameter, or `system` for the system prompt; /set alone shows all
/unset NAME       return to the model's own value
/image PATH       show an image with the next message; /video and /audio likewise
/clear            forget the conversation
/help             show this
/bye              leave, as Ctrl-D does
{FENCE}               opens and closes a message of several lines
Ctrl-C            ends the answer
"""


@dataclass(frozen=True)
class Asked:
    """A prompt with its answer formats; None: plain text."""

    prompt: PromptType
    formats: ModelFormat | None = None
    end: PromptEnd = field(default_factory=PromptEnd)


class AnswerPrinting:
    """Generates answers on an engine and prints them.

    Args:
        engine: with no other requests.
        media: images of its conversations.
    """

    def __init__(self, engine: LLMEngine, media: OfflineMedia) -> None:
        self._engine = engine
        self._media = media
        self._ids = map(str, itertools.count())

    @property
    def has_chat(self) -> bool:
        """True if the model has a chat template."""
        return self._engine.tokenizer is not None and self._engine.tokenizer.chat_template is not None

    def ask(self, messages: list[ChatMessage]) -> Asked:
        """Return the prompt of a conversation.

        Raises:
            ValidationError: there is no chat template, it refuses the conversation, or an image cannot be used.
        """
        from quire.entrypoints.chat.template import ChatTemplate
        from quire.entrypoints.chat.thinking_switch import ThinkingSwitch

        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "checked at start"
        taken = self._media.admit(messages, None)
        messages = list(taken.messages)
        template = tokenizer.cached(
            "run", lambda own: ChatTemplate.from_tokenizer(own, media=self._media.gate.texts)
        )
        chat = template.compose(messages)
        chosen = choose("none", "auto", template.all_sources, examples_of(template))
        formats = ModelFormat(chosen, tokenizer)
        is_off = ThinkingSwitch(template, chosen.reasoning).is_off({})
        end = PromptEnd.of(chat.text, messages, continues=False, may_think=not is_off)
        prompt = self._media.gate.encode(chat, tokenizer, taken.admitted).as_prompt()
        return Asked(prompt, formats, end)

    def answer(self, asked: Asked, given: Mapping[str, Any]) -> str:
        """Print the answer, and return what it says, without its reasoning; Ctrl-C cuts it.

        Args:
            given: sampling parameters over the model's own.

        Raises:
            ValidationError: a parameter is out of range.
            EngineError: the request failed in the engine, say because its image cannot be encoded.
        """
        request_id = next(self._ids)
        reader = asked.formats.reader(asked.end, None) if asked.formats is not None else PlainReader()
        shown = _Shown(AnswerPrinter())
        was_cut = False
        try:
            self._engine.add_request(request_id, asked.prompt, self._sampling_params(asked, given))
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.request_id == request_id:  # not the rest of one that two interrupts have ended
                        shown.add(reader.feed("".join(completion.text for completion in output.outputs)))
                        was_cut = any(completion.was_cut for completion in output.outputs)
                        _raise_failure(output)
        except KeyboardInterrupt:
            was_cut = True
            self._engine.abort_request(request_id)
            while self._engine.has_unfinished_requests():
                self._engine.step()
        shown.add(reader.finish(was_cut=was_cut))
        shown.printer.end()
        return shown.text

    def _sampling_params(self, asked: Asked, given: Mapping[str, Any]) -> SamplingParams:
        defaults = self._engine.input_processor.default_sampling_params
        sampling = SamplingParams(**{**defaults, **given, "output_kind": RequestOutputKind.DELTA})
        return sampling if asked.formats is None else asked.formats.with_format_options(sampling, asked.end)


def _raise_failure(output: RequestOutput) -> None:
    """Raise EngineError if a completion failed."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise EngineError(f"the request failed: {completion.stop_reason or 'the log says why'}")


@dataclass
class _Shown:
    """Printed part of an answer."""

    printer: AnswerPrinter
    text: str = ""

    def add(self, found: list[Event]) -> None:
        for event in found:
            if isinstance(event, Reasoning):
                self.printer.thought(event.text)
            elif isinstance(event, str):
                self.text += event
                self.printer.said(event)


MediaFile = tuple[str, str]
"""Kind of media (of `MEDIA_KINDS`) and path."""
MEDIA_KINDS = ("image", "video", "audio")


def user_message(text: str, files: Sequence[MediaFile]) -> ChatMessage:
    """Return a user's message with images, videos and sounds before the text."""
    shown = [{"type": f"{kind}_url", f"{kind}_url": path} for kind, path in files]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}


def _texts(value: str) -> tuple[str, ...]:
    return (value,)


SETTABLE: Mapping[str, Callable[[str], Any]] = {
    "system": str,
    "temperature": float,
    "top_p": float,
    "top_k": parse_integer,
    "min_p": float,
    "max_tokens": parse_integer,
    "repetition_penalty": float,
    "seed": parse_integer,
    "stop": _texts,
}
"""Names of `/set`, with the reader of their values."""


class ChatSession:
    """Conversation with a model in this process, and its commands.

    Args:
        given: sampling parameters over the model's own.
        files: images, videos and sounds for the first message.
    """

    def __init__(
        self,
        printing: AnswerPrinting,
        system_prompt: str | None,
        given: Mapping[str, Any],
        files: Sequence[MediaFile] = (),
    ) -> None:
        self._printing = printing
        self._given_files = files
        self._files = [*files]  # of the next message
        self._system_prompt = system_prompt
        self._given = dict(given)
        self.messages: list[ChatMessage] = []

    def run(self, read: Callable[[str], str] | None = None) -> None:
        """Answer messages until the input ends, or /bye; `read` replaces `input`."""
        while True:
            try:
                text = read_message(read or input).strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\nCtrl-D ends the chat", err=True)
                continue
            if text == "/bye":
                return
            if text:
                self._handle(text)

    def _handle(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._command(text)
            else:
                self.turn(text)
        except QuireError as error:
            click.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:  # before the answer began, or again while it ended
            click.echo("\ninterrupted; the message is not kept", err=True)

    def turn(self, text: str) -> None:
        """Answer a message, and keep both."""
        files, self._files = self._files, []  # a file that the model cannot use fails this message only
        messages = [*self.messages, user_message(text, files)]
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        said = self._printing.answer(self._printing.ask([*system, *messages]), self._given)
        self.messages = [*messages, {"role": "assistant", "content": said}]

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        shows: dict[str, Callable[[str], None]] = {
            f"/{kind}": partial(self._show, kind) for kind in MEDIA_KINDS
        }
        commands: dict[str, Callable[[str], None]] = {
            "/set": self._set, "/unset": self._unset, **shows, "/clear": self._clear, "/help": self._help
        }  # fmt: skip
        if name not in commands:
            known = suggestion(name, commands) or f"; there are {', '.join((*commands, '/bye'))}"
            raise ValidationError(f"no command {name!r}{known}")
        commands[name](rest.strip())

    def _set(self, rest: str) -> None:
        if not rest:
            shown = {"system": self._system_prompt, **self._given}
            click.echo(
                "".join(f"{name} {value}\n" for name, value in shown.items() if value not in (None, ())),
                nl=False,
                err=True,
            )
            return
        name, _, value = rest.partition(" ")
        read = SETTABLE.get(name)
        if read is None:
            raise ValidationError(f"/set has no {name!r}; there are {', '.join(SETTABLE)}")
        if name == "system":
            self._system_prompt = value
            return
        try:
            given = {**self._given, name: read(value)}
        except ValueError:
            raise ValidationError(f"/set {name} needs a number, got {value!r}") from None
        SamplingParams(**given)  # refuses what is out of range
        self._given = given

    def _unset(self, name: str) -> None:
        if name == "system":
            self._system_prompt = None
        elif self._given.pop(name, None) is None:
            raise ValidationError(f"{name!r} is not set")

    def _show(self, kind: str, path: str) -> None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValidationError(f"/{kind} needs the path of a file, got {path!r}")
        self._files.append((kind, str(file.resolve())))

    def _clear(self, _: str) -> None:
        self.messages, self._files = [], [*self._given_files]

    def _help(self, _: str) -> None:
        click.echo(HELP, nl=False, err=True)


def read_message(read: Callable[[str], str]) -> str:
    """Return the next message, of one line, or of several between fences."""
    line = read(">>> ")
    if not line.startswith(FENCE):
        return line
    lines = [line.removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(read("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")
