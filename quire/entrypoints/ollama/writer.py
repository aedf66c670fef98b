# SPDX-License-Identifier: Apache-2.0
"""Ollama's replies, whole and as lines of JSON.

Invariant: texts and calls of a stream's lines concatenate to those of the whole reply, and the last line has the
counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET

from quire.entrypoints.ollama.protocol import CalledFunction, Line, OllamaCall, TurnMessage
from quire.entrypoints.openai.errors import body_of, ollama_body, status_of
from quire.entrypoints.openai.protocol.responses import ChatChunk, TokenLogprob, ToolCallMessage, Usage
from quire.entrypoints.openai.streaming import StreamFormat
from quire.entrypoints.openai.translation import AnswerDelta, as_object
from quire.outputs import RequestStateStats

DONE_REASONS = {"length": "length", "timeout": "length"}


def _error_line(error: BaseException, request_id: str) -> bytes:
    return msgspec.json.encode(ollama_body(body_of(error, request_id), status_of(error), request_id)) + b"\n"


def now() -> str:
    """Return the current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineWriter:
    """Writer of the reply of /api/chat, or with `is_chat` False of /api/generate."""

    stream_format = StreamFormat("application/x-ndjson", _error_line)

    def __init__(self, model: str, *, is_chat: bool, with_logprobs: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._with_logprobs = with_logprobs
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[OllamaCall] = []
        self._logprobs: list[TokenLogprob] = []
        self._done_reason = "stop"
        self._last: Line | None = None

    def encode(self, event: msgspec.Struct) -> bytes:
        return msgspec.json.encode(event) + b"\n"

    def opening(self, usage: Usage) -> Iterator[msgspec.Struct]:
        yield from ()

    def take(self, piece: AnswerDelta) -> Iterator[msgspec.Struct]:
        calls = [_call(call) for call in piece.tool_calls]
        self._calls += calls
        self._texts.append(piece.content)
        self._thoughts.append(piece.reasoning)
        self._logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self._done_reason = DONE_REASONS.get(piece.finish_reason, "stop")
        if piece.content or piece.reasoning or calls or piece.logprobs:
            yield self._line(piece.content, calls, piece.logprobs, piece.reasoning)

    def closing(self, last: ChatChunk, stats: RequestStateStats) -> Iterator[msgspec.Struct]:
        assert isinstance(last.usage, Usage)
        self._last = self.loaded(self._done_reason)
        self._last.total_duration = _ns(stats.queued_ts, stats.last_token_ts)
        self._last.load_duration = 0
        self._last.prompt_eval_count = last.usage.prompt_tokens
        self._last.prompt_eval_duration = _ns(stats.scheduled_ts, stats.first_token_ts)
        self._last.eval_count = last.usage.completion_tokens
        self._last.eval_duration = _ns(stats.first_token_ts, stats.last_token_ts)
        self._last.usage, self._last.timings = last.usage, last.timings
        self._last.ignored, self._last.adjusted = last.ignored, last.adjusted
        yield self._last

    def result(self) -> Line:
        assert self._last is not None
        whole = self._line("".join(self._texts), self._calls, self._logprobs, "".join(self._thoughts))
        return msgspec.structs.replace(
            self._last,
            message=whole.message,
            response=whole.response,
            thinking=whole.thinking,
            logprobs=whole.logprobs,
        )

    def loaded(self, reason: str) -> Line:
        """Return a last line without text; with the reason "load", the reply to a request without a prompt."""
        line = self._line("", [], [])
        line.done, line.done_reason = True, reason
        return line

    def _line(
        self, text: str, calls: list[OllamaCall], logprobs: list[TokenLogprob], thought: str = ""
    ) -> Line:
        thinking = thought or UNSET
        return Line(
            model=self._model,
            created_at=now(),
            message=TurnMessage(text, calls or UNSET, thinking=thinking) if self._is_chat else UNSET,
            response=UNSET if self._is_chat else text,
            thinking=UNSET if self._is_chat else thinking,
            logprobs=logprobs if self._with_logprobs and logprobs else UNSET,
        )


def _call(call: ToolCallMessage) -> OllamaCall:
    """Convert a call, which chat sends as a whole."""
    return OllamaCall(call.id, CalledFunction(call.function.name, as_object(call.function.arguments)))


def _ns(start: float, end: float) -> int:
    """Return the nanoseconds between two times in seconds; 0 if one is missing."""
    return max(0, round((end - start) * 1e9)) if start and end else 0
