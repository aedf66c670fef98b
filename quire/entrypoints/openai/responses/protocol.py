"""Requests, objects and events of the Responses API; a field that is None is written as null.

Invariant: `type` stands first in every item and event, and every event has its number in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType, field
from pydantic import Field

from quire.entrypoints.openai.field_policy import Place
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.protocol.responses import Timings, TokenLogprob

WITHOUT_EFFECT = ("reasoning", "stream_options")
"""Fields that change nothing: there is no reasoning here, and no padding of the stream."""


PART = Place(frozenset({"type", "text", "refusal"}))
ITEM = Place(
    frozenset({"type", "role", "content", "call_id", "name", "arguments", "output"}),
    inner={"content": PART, "output": PART},
)
TOOL = Place(frozenset({"type", "name", "description", "parameters", "strict"}))


class ResponsesRequest(RequestModel):
    """POST /v1/responses; the fields from `top_k` on are quire's own."""

    inner: ClassVar[Mapping[str, Place]] = {"input": ITEM, "tools": TOOL}

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    user: str | None = Field(None, max_length=256)
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class InputDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText] = field(default_factory=list)
    role: str = "assistant"


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


Item = MessageItem | CallItem


class Problem(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """One response; the settings are those of the request."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    error: Problem | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    background: bool = False
    store: bool = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int] | UnsetType = UNSET


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class Created(ResponseEvent, tag="response.created"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class EndedIncomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: Item


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str
