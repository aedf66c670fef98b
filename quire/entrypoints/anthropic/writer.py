# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages, whole and as events.

Invariant: blocks are numbered from 0 without gaps. One is open at a time, and its deltas concatenate to the block of
the whole message.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.entrypoints.anthropic.protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    Stopped,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from quire.entrypoints.openai.errors import anthropic_body, body_of, status_of
from quire.entrypoints.openai.protocol.responses import ChatChunk, ToolCallMessage, Usage
from quire.entrypoints.openai.streaming import StreamFormat
from quire.entrypoints.openai.translation import Piece, as_object
from quire.outputs import RequestStateStats

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "timeout": "max_tokens"}


def _error_event(error: BaseException, request_id: str) -> bytes:
    body = anthropic_body(body_of(error, request_id), status_of(error), request_id)
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


class MessageWriter:
    """Writer of one message."""

    stream_format = StreamFormat(
        "text/event-stream", _error_event, ping=b'event: ping\ndata: {"type": "ping"}\n\n'
    )

    def __init__(self, message_id: str, model: str) -> None:
        self._message = Message(id=message_id, model=model, content=[], usage=MessageUsage(0, 0))
        self._pieces: list[str] = []  # pieces of the open block
        self._call_index = -1

    def encode(self, event: msgspec.Struct) -> bytes:
        name = str(event.__struct_config__.tag).encode()
        return b"event: " + name + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def opening(self, usage: Usage) -> Iterator[msgspec.Struct]:
        self._message.usage = _usage(usage)
        yield MessageStart(self._message)

    def take(self, piece: Piece) -> Iterator[msgspec.Struct]:
        if piece.reasoning:
            if not isinstance(self._open_block, ThinkingBlock):
                yield from self._start(ThinkingBlock(""))
            self._pieces.append(piece.reasoning)
            yield BlockDelta(self._index, ThinkingDelta(piece.reasoning))
        if piece.content:
            if not isinstance(self._open_block, TextBlock):
                yield from self._start(TextBlock(""))
            self._pieces.append(piece.content)
            yield BlockDelta(self._index, TextDelta(piece.content))
        for call in piece.tool_calls:
            yield from self._call(call)
        if piece.finish_reason is not None:
            yield from self._stop()
            self._note_reason(piece)

    def closing(self, last: ChatChunk, stats: RequestStateStats) -> Iterator[msgspec.Struct]:
        assert isinstance(last.usage, Usage)
        message = self._message
        message.usage = _usage(last.usage)
        message.timings, message.ignored, message.adjusted = last.timings, last.ignored, last.adjusted
        stopped = Stopped(message.stop_reason, message.stop_sequence)
        yield MessageDelta(stopped, message.usage, message.timings, message.ignored, message.adjusted)
        yield MessageStop()

    def result(self) -> Message:
        return self._message

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1

    @property
    def _open_block(self) -> Block | None:
        return self._message.content[-1] if self._message.content else None

    def _call(self, call: ToolCallMessage) -> Iterator[msgspec.Struct]:
        assert isinstance(call.index, int)
        if call.index != self._call_index:
            self._call_index = call.index
            yield from self._start(ToolUseBlock(call.id, call.function.name, msgspec.Raw(b"{}")))
        self._pieces.append(call.function.arguments)
        yield BlockDelta(self._index, InputDelta(call.function.arguments))

    def _start(self, block: Block) -> Iterator[msgspec.Struct]:
        yield from self._stop()
        self._message.content.append(block)
        yield BlockStart(self._index, block)

    def _stop(self) -> Iterator[msgspec.Struct]:
        """Close the open block, which is now complete."""
        block, whole = self._open_block, "".join(self._pieces)
        if block is None:
            return
        if isinstance(block, TextBlock):
            block.text = whole
        elif isinstance(block, ThinkingBlock):
            block.thinking = whole
            yield BlockDelta(self._index, SignatureDelta())
        else:
            block.input = as_object(whole)
        self._pieces = []
        yield BlockStop(self._index)

    def _note_reason(self, piece: Piece) -> None:
        message = self._message
        message.stop_reason = STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        if message.stop_reason == "end_turn" and isinstance(piece.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", piece.stop_reason


def _usage(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
    )
