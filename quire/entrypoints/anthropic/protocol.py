"""Anthropic's requests and replies; only what a text model can honour has a field.

Invariant: `type` stands first in every event and block, under the name that Anthropic's clients look up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quire.entrypoints.openai.field_policy import Place
from quire.entrypoints.openai.protocol.requests import Messages, RequestModel
from quire.entrypoints.openai.protocol.responses import Timings

WITHOUT_EFFECT = (
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "thinking", "user_profile_id", "workspace_id",
)  # fmt: skip
"""Fields of Anthropic's that cannot change the answer of a model of ours."""


TEXT = Place(frozenset({"type", "text"}))
BLOCK = Place(
    frozenset({"type", "text", "id", "name", "input", "tool_use_id", "content"}), inner={"content": TEXT}
)
MESSAGE = Place(frozenset({"role", "content"}), inner={"content": BLOCK}, empty=frozenset({"content"}))
TOOL = Place(frozenset({"type", "name", "description", "input_schema", "strict"}))


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens"""

    inner: ClassVar[Mapping[str, Place]] = {"messages": MESSAGE, "system": TEXT, "tools": TOOL}

    model: str | None = None
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    speed: Any = None
    thinking: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages; the last five fields are quire's own."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that were computed; those found in the prefix cache stand apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int] | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock | ToolUseBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stopped(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int] | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass
