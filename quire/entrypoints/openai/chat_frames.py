"""The stream of a chat completion, as bytes.

Invariant: the bytes are those of the chunks, whichever way they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from quire.entrypoints.chat.formats.events import Event, Reasoning
from quire.entrypoints.openai.chat_choice import ChatChoiceBuilder
from quire.entrypoints.openai.protocol.responses import ChatChunk, ChatChunkChoice
from quire.entrypoints.openai.stream_usage import StreamUsage
from quire.entrypoints.openai.streaming import TextFrame, frame
from quire.outputs import CompletionOutput, RequestOutput


class Chunks(Protocol):
    """What makes the chunks of an answer."""

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]: ...

    def chunks_of_piece(
        self, completion: CompletionOutput, found: list[Event], more: dict[str, Any]
    ) -> Iterator[ChatChunk]: ...

    def chunk(self, choices: list[ChatChunkChoice], more: dict[str, Any]) -> ChatChunk: ...

    def choice(self, index: int) -> ChatChoiceBuilder | None: ...


class ChatFrames:
    """Writes the chunks of one answer; with `shows_tokens` they have more of a token than its text.

    Nearly all outputs are nothing but a piece of one choice's text or reasoning, and all chunks of one kind are alike.
    """

    def __init__(self, answer: Chunks, usage: StreamUsage, *, shows_tokens: bool) -> None:
        self._answer = answer
        self._usage = usage
        self._are_alike = usage.shows_nothing_yet and not shows_tokens
        self._text_frames: dict[tuple[int, bool], TextFrame] = {}

    def of(self, _: int, output: RequestOutput) -> bytes:
        if self._are_alike and len(output.outputs) == 1:
            (completion,) = output.outputs
            choice = self._answer.choice(completion.index)
            if choice is not None and completion.finish_reason is None:
                return self._of_piece(completion, choice)
        return b"".join(map(frame, self._answer.chunks_of(output, self._usage)))

    def closing(self) -> bytes:
        return frame(self._answer.chunk([], self._usage.closing())) if self._usage.wanted else b""

    def _of_piece(self, completion: CompletionOutput, choice: ChatChoiceBuilder) -> bytes:
        self._usage.pass_by(0, completion)
        found = choice.read(completion.text, completion.token_ids)
        event = found[0] if len(found) == 1 else None if found else ""
        if isinstance(event, str):
            return self._text_frame(completion, is_reasoning=False).of(event)
        if isinstance(event, Reasoning) and choice.shows_reasoning:
            return self._text_frame(completion, is_reasoning=True).of(event.text)
        more = self._usage.of_opening()
        return b"".join(map(frame, self._answer.chunks_of_piece(completion, found, more)))

    def _text_frame(self, completion: CompletionOutput, *, is_reasoning: bool) -> TextFrame:
        known = self._text_frames.get((completion.index, is_reasoning))
        if known is None:
            mark = TextFrame.MARK
            found: list[Event] = [Reasoning(mark) if is_reasoning else mark]
            (chunk,) = self._answer.chunks_of_piece(completion, found, self._usage.of_opening())
            known = self._text_frames[completion.index, is_reasoning] = TextFrame(chunk)
        return known
