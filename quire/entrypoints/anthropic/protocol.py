# SPDX-License-Identifier: Apache-2.0
"""Anthropic's requests and replies; only fields that a text model supports.

Invariant: `type` comes first in every event and block, with Anthropic's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema

from quire.entrypoints.openai.field_rules import FieldRules
from quire.entrypoints.openai.protocol import shapes
from quire.entrypoints.openai.protocol.media_shapes import of_media
from quire.entrypoints.openai.protocol.relations import either, has_items
from quire.entrypoints.openai.protocol.requests import Objects, RequestModel, SamplerFields, TemplateOptions
from quire.entrypoints.openai.protocol.responses import Timings
from quire.entrypoints.openai.protocol.shapes import any_of, array, enum, object_of

WITHOUT_EFFECT = (
    "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "user_profile_id", "workspace_id",
)  # fmt: skip  # Fields without effect on the answer.
MAX_USER_CHARS = 256
# Type of `thinking` -> whether the model thinks.
THINKS = {"enabled": True, "adaptive": True, "disabled": False}

OWN_TOOLS = ("custom", "function")  # Types of tools that the client describes.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "container_upload", "tool_reference", "redacted_thinking")
# Block types that only Anthropic's servers use, and the suffix of their tools' results.
SERVER_RESULT = "_tool_result"

TEXT = FieldRules(frozenset({"type", "text", "content"}))
DOCUMENT = FieldRules(
    frozenset({"type", "text", "source", "title", "context", "content"}),
    inner={"source": FieldRules(frozenset({"type", "data", "media_type", "url"})), "content": TEXT},
)
BLOCK = FieldRules(
    DOCUMENT.honored | {"thinking", "id", "name", "input", "tool_use_id"},
    inner={**DOCUMENT.inner, "content": DOCUMENT},
)
MESSAGE = FieldRules(frozenset({"role", "content"}), inner={"content": BLOCK}, empty=frozenset({"content"}))
OUTPUT = FieldRules(
    frozenset({"format", "effort"}), inner={"format": FieldRules(frozenset({"type", "schema"}))}
)
TOOL = FieldRules(frozenset({"type", "name", "description", "input_schema", "strict"}))

# Checked by `conversation.prompt_fields`.
TEXT_BLOCK = any_of(
    object_of({"type": enum("text"), "text": shapes.TEXT}),
    object_of({"type": enum("compaction")}, {"content": shapes.TEXT}),
)
IMAGE_SOURCE = any_of(
    object_of({"type": enum("base64"), "media_type": shapes.TEXT, "data": shapes.TEXT}),
    object_of({"type": enum("url"), "url": shapes.TEXT}),
)
TEXTS = any_of(
    *TEXT_BLOCK["anyOf"],
    object_of({"type": enum("search_result"), "content": array(TEXT_BLOCK)}, {"title": {}, "source": {}}),
    object_of(
        {"type": enum("document"), "source": object_of({"type": enum("text"), "data": shapes.TEXT})},
        {"title": {}, "context": {}},
    ),
    of_media(object_of({"type": enum("image"), "source": IMAGE_SOURCE})),
)
LEFT_OUT = object_of({"type": any_of(enum(*SERVER_BLOCKS), {**shapes.TEXT, "pattern": f"{SERVER_RESULT}$"})})
CONTENT = any_of(shapes.TEXT, array(TEXTS))
CONTENT_OF_MESSAGE = any_of(shapes.TEXT, array(any_of(TEXTS, LEFT_OUT)))
TOOL_USE = object_of({"type": enum("tool_use"), "name": shapes.TEXT}, {"id": shapes.TEXT, "input": {}})
TOOL_RESULT = object_of(
    {"type": enum("tool_result"), "tool_use_id": shapes.TEXT}, {"content": CONTENT_OF_MESSAGE}
)
THOUGHT = object_of({"type": enum("thinking"), "thinking": shapes.TEXT})
THINKING = object_of({"type": enum(*THINKS)})

PARALLEL = {"disable_parallel_tool_use": {"type": "boolean"}}


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return object_of(
        {"role": enum(role)}, {"content": any_of(shapes.TEXT, array(any_of(TEXTS, LEFT_OUT, *blocks)))}
    )


MESSAGES = array(
    any_of(_message("user", TOOL_RESULT), _message("assistant", TOOL_USE, THOUGHT), _message("system")),
    minItems=1,
    maxItems=shapes.MAX_MESSAGES,
)
TOOLS = array(
    any_of(
        shapes.read_if_strict(
            object_of(
                {"name": shapes.FUNCTION["properties"]["name"], "input_schema": {"type": "object"}},
                {
                    "type": {**shapes.TEXT, "minLength": 1},
                    "description": shapes.TEXT,
                    "strict": {"type": "boolean"},
                },
            ),
            "input_schema",
        ),
        object_of({"type": shapes.other_type(*OWN_TOOLS)}, {"input_schema": shapes.NULL}),
    )
)
TOOL_CHOICE = any_of(
    object_of({"type": enum("auto", "any", "none")}, PARALLEL),
    object_of({"type": enum("tool"), "name": shapes.TEXT}, PARALLEL),
)
TOOLS_IF_CHOSEN = either(
    {"properties": {"tool_choice": any_of(shapes.NULL, object_of({"type": enum("auto", "none")}))}},
    has_items("tools"),
)
FORMAT = object_of({"type": enum("json_schema"), "schema": {"type": "object"}})
OUTPUT_CONFIG = object_of({}, {"format": FORMAT, "effort": shapes.TEXT})
METADATA = object_of({}, {"user_id": {**shapes.TEXT, "maxLength": MAX_USER_CHARS}})


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens"""

    inner: ClassVar[Mapping[str, FieldRules]] = {
        "messages": MESSAGE,
        "system": DOCUMENT,
        "tools": TOOL,
        "thinking": FieldRules(frozenset({"type"})),
        "tool_choice": FieldRules(frozenset({"type", "name", "disable_parallel_tool_use"})),
        "output_config": OUTPUT,
    }
    without_effect: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT
    relations: ClassVar[tuple[dict[str, Any], ...]] = (TOOLS_IF_CHOSEN,)

    model: str | None = None
    messages: Annotated[
        Objects, Field(min_length=1, max_length=shapes.MAX_MESSAGES), WithJsonSchema(MESSAGES)
    ]
    system: Annotated[str | Objects | None, WithJsonSchema(shapes.optional(CONTENT))] = None
    tools: Annotated[Objects | None, WithJsonSchema(shapes.optional(TOOLS))] = None
    tool_choice: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(TOOL_CHOICE))] = None
    output_config: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(OUTPUT_CONFIG))] = None
    chat_template_kwargs: TemplateOptions = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(METADATA))] = None
    service_tier: Any = None
    speed: Any = None
    thinking: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(THINKING))] = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountTokensRequest, SamplerFields):
    """POST /v1/messages; samplers besides `temperature`, `top_p` and `top_k`, and the last two fields, are
    quire's own."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts; `input_tokens` excludes tokens found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning; the signature is empty, because reasoning is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str = ""


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


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
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


# Events of a stream.
AnyEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
