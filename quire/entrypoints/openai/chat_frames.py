"""The stream of a chat completion, as bytes.

Invariant: the bytes are those of the chunks, whichever way they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from quire.entrypoints.openai.protocol.responses import ChatChunk, ChatChunkChoice, ChatDelta
from quire.entrypoints.openai.stream_usage import StreamUsage
from quire.entrypoints.openai.streaming import TextFrame, frame
from quire.outputs import RequestOutput


class Chunks(Protocol):
    """What makes the chunks of an answer."""

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]: ...

    def chunk(self, choices: list[ChatChunkChoice], more: dict[str, Any]) -> ChatChunk: ...

    def passes_text(self, index: int) -> bool: ...


class ChatFrames:
    """Writes the chunks of one answer; with `shows_tokens` they have more of a token than its text."""

    def __init__(self, answer: Chunks, usage: StreamUsage, *, shows_tokens: bool) -> None:
        self._answer = answer
        self._usage = usage
        self._text_frames: dict[int, TextFrame] = {}
        self._shows_tokens = shows_tokens

    def of(self, _: int, output: RequestOutput) -> bytes:
        plain = self._plain(output)
        return b"".join(map(frame, self._answer.chunks_of(output, self._usage))) if plain is None else plain

    def closing(self) -> bytes:
        return frame(self._answer.chunk([], self._usage.closing())) if self._usage.wanted else b""

    def _plain(self, output: RequestOutput) -> bytes | None:
        """What `chunks_of` makes of an output that is nothing but a piece of text of one choice, as nearly all are."""
        completion, *others = output.outputs
        if others or completion.finish_reason is not None:
            return None
        text_frame = self._text_frames.get(completion.index)
        if text_frame is None:
            if self._shows_tokens or not self._usage.shows_nothing_yet:
                return None
            if not self._answer.passes_text(completion.index):
                return None
            choice = ChatChunkChoice(index=completion.index, delta=ChatDelta(content=TextFrame.MARK))
            text_frame = TextFrame(self._answer.chunk([choice], self._usage.of_opening()))
            self._text_frames[completion.index] = text_frame
        self._usage.pass_by(0, completion)
        return text_frame.of(completion.text)
