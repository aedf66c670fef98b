# SPDX-License-Identifier: Apache-2.0
"""Requests, objects and events of the Responses API; None is written as null.

Invariant: `type` comes first in every item and event, and every event has its number in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType, field
from pydantic import Field, WithJsonSchema

from quire.entrypoints.openai.field_rules import FieldRules
from quire.entrypoints.openai.protocol import shapes
from quire.entrypoints.openai.protocol.constraints import StructuredOutputs
from quire.entrypoints.openai.protocol.media_shapes import media_parts
from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has, has_items
from quire.entrypoints.openai.protocol.requests import Objects, SamplerFields, TemplateOptions
from quire.entrypoints.openai.protocol.responses import Timings, TokenLogprob
from quire.entrypoints.openai.protocol.shapes import any_of, array, enum, object_of, text_parts

WITHOUT_EFFECT = ("stream_options",)  # Fields without effect: streams have no padding.
# Type of a text part -> field that holds the text.
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "mcp_call": "arguments",
}  # Types of call items whose text the model can read -> field with their arguments.
# Calls of tools that have no name besides their type.
FIXED_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
OUTPUTS = tuple(f"{kind}_output" for kind in CALLS if kind != "mcp_call")
# limit of a namespace's name, and of a name in it; joined they are the model's tool name
MAX_PART_CHARS = 120
REFERENCE = "item_reference"
TEXT_FIELDS = ("content", "output")  # Fields whose text would be lost with an item of an unknown type.

PART = FieldRules(
    frozenset({"type", "text", "refusal", "stdout", "stderr", "image_url", "detail", "file_id"})
)
ITEM = FieldRules(
    frozenset({"type", "role", "content", "call_id", "name", "namespace", "arguments", "input", "output"})
    | {"action", "operation"},
    inner={"content": PART, "output": PART},
)
DESCRIBED = frozenset({"type", "name", "description", "parameters", "strict", "format"})
TOOL = FieldRules(DESCRIBED | {"tools"}, inner={"tools": FieldRules(DESCRIBED)})
TEXT = FieldRules(
    frozenset({"format"}),
    inner={"format": FieldRules(frozenset({"type", "name", "description", "schema", "strict"}))},
)

# `conversation.chat_fields` reads these.
_PARTS = (text_parts(TEXT_PARTS), *media_parts("input_image"))
CONTENT = any_of(shapes.TEXT, array(any_of(*_PARTS)))
OUTPUT = any_of(
    shapes.TEXT,
    array(any_of(*_PARTS, object_of({"stdout": shapes.TEXT}, {"type": shapes.NULL, "stderr": shapes.TEXT}))),
)
INPUT = any_of(
    shapes.TEXT,
    array(
        any_of(
            object_of(
                {"role": enum("user", "system", "developer"), "content": CONTENT}, {"type": enum("message")}
            ),
            object_of({"role": enum("assistant")}, {"type": enum("message"), "content": CONTENT}),
            object_of(
                {"type": enum("function_call"), "name": shapes.TEXT},
                {"call_id": shapes.TEXT, "namespace": shapes.TEXT, "arguments": {}},
            ),
            object_of(
                {"type": enum("mcp_call"), "name": shapes.TEXT},
                {"call_id": shapes.TEXT, "namespace": shapes.TEXT, "arguments": {}, "output": OUTPUT},
            ),
            object_of(
                {"type": enum("custom_tool_call"), "name": shapes.TEXT},
                {"call_id": shapes.TEXT, "namespace": shapes.TEXT, "input": {}},
            ),
            object_of({"type": enum(*FIXED_CALLS)}, {"call_id": shapes.TEXT, "action": {}, "operation": {}}),
            object_of({"type": enum(*OUTPUTS)}, {"call_id": shapes.TEXT, "output": OUTPUT}),
            object_of({"type": enum("reasoning")}, {"content": array(object_of({}, {"text": shapes.TEXT}))}),
            object_of({"type": {**shapes.other_type(*CALLS, *OUTPUTS), "pattern": "_call(_output)?$"}}),
            object_of(
                {"type": shapes.other_type("message", "reasoning", REFERENCE, *CALLS, *OUTPUTS)},
                dict.fromkeys(TEXT_FIELDS, shapes.NULL),
            ),
        ),
        minItems=1,
    ),
)
_FORMAT = {"format": {"type": "object"}}


def _named(kind: str, max_chars: int, others: dict[str, Any]) -> dict[str, Any]:
    name = {**shapes.TEXT, "minLength": 1, "maxLength": max_chars}
    return object_of({"type": enum(kind), "name": name}, {"description": shapes.TEXT, **_FORMAT, **others})


def _tools(max_chars: int) -> list[dict[str, Any]]:
    function = {"parameters": {"type": "object"}, "strict": {"type": "boolean"}}
    return [shapes.read_if_strict(_named("function", max_chars, function)), _named("custom", max_chars, {})]


_MEMBERS = array(
    any_of(*_tools(MAX_PART_CHARS), object_of({"type": shapes.other_type("function", "custom")}))
)
TOOLS = array(
    any_of(
        *_tools(256),
        _named("namespace", MAX_PART_CHARS, {"tools": _MEMBERS}),
        object_of({"type": shapes.other_type("function", "custom", "namespace")}),
    )
)
FORMAT = any_of(
    object_of({"type": enum("text", "json_object")}),
    object_of(
        {"type": enum("json_schema"), "name": shapes.TEXT, "schema": {"type": "object"}},
        {"description": shapes.TEXT, "strict": {"type": "boolean"}},
    ),
)
TOOL_CHOICE = any_of(
    shapes.TOOL_CHOICE,
    object_of({"type": enum("function", "custom"), "name": shapes.TEXT}, {"namespace": shapes.TEXT}),
)
TEXT_CONFIG = object_of({}, {"format": FORMAT})
REASONING = object_of({}, {"effort": shapes.TEXT})
Stateless = Annotated[bool | None, WithJsonSchema(enum(False, None))]

# Relations that `conversation.chat_fields` and chat check.
_SAID = {
    "anyOf": [
        {"properties": {"type": enum("message", *CALLS, *OUTPUTS, None)}},
        {
            "properties": {
                "content": {
                    "type": "array",
                    "contains": {
                        "properties": {"text": {**shapes.TEXT, "minLength": 1}},
                        "required": ["text"],
                    },
                }
            },
            "required": ["content"],
        },
    ]
}
RELATIONS = (
    either(
        both(
            asks_nothing("top_logprobs"),
            {"properties": {"include": {"items": {"not": enum(shapes.INCLUDED_LOGPROBS)}}}},
        ),
        asks_nothing("tools", []),
    ),
    either(asks_nothing("tool_choice", "none", "auto"), has_items("tools")),
    either(
        asks_nothing("structured_outputs"),
        {
            "properties": {
                "text": {"properties": {"format": any_of(shapes.NULL, object_of({"type": enum("text")}))}}
            }
        },
    ),
    either(
        has("instructions", {**shapes.TEXT, "minLength": 1}),
        {"properties": {"input": any_of(shapes.TEXT, {"type": "array", "contains": _SAID})}},
    ),
)


class ResponsesRequest(SamplerFields):
    """POST /v1/responses; fields from `stop` on, and samplers besides `temperature` and `top_p`, are quire's own."""

    inner: ClassVar[Mapping[str, FieldRules]] = {
        "input": ITEM,
        "tools": TOOL,
        "text": TEXT,
        "reasoning": FieldRules(frozenset({"effort"})),
    }
    without_effect: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT
    relations: ClassVar[tuple[dict[str, Any], ...]] = RELATIONS

    model: str | None = None
    input: Annotated[str | Objects, WithJsonSchema(INPUT)]
    instructions: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    tools: Annotated[Objects | None, WithJsonSchema(shapes.optional(TOOLS))] = None
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    text: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(TEXT_CONFIG))] = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(REASONING))] = None
    metadata: dict[str, str] | None = None
    truncation: Annotated[str | None, WithJsonSchema(enum("disabled", None))] = None
    user: str | None = Field(None, max_length=256)
    store: Stateless = None
    background: Stateless = None
    previous_response_id: Annotated[str | None, WithJsonSchema(enum("", None))] = None
    conversation: Annotated[Any, WithJsonSchema(shapes.NULL)] = None
    prompt: Annotated[Any, WithJsonSchema(shapes.NULL)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: TemplateOptions = None
    structured_outputs: StructuredOutputs = None


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


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning item; the summary is empty, because the full text is in `content`."""

    id: str
    status: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem


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
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


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
    part: OutputText | ReasoningText


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class OutputTextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(PartEvent, tag="response.output_text.done", kw_only=True):
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


class CustomInputDelta(Event, tag="response.custom_tool_call_input.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class InputDone(Event, tag="response.custom_tool_call_input.done", kw_only=True):
    item_id: str
    output_index: int
    input: str


AnyEvent = (
    Created | InProgress | Completed | EndedIncomplete | Failed | ItemAdded | ItemDone | PartAdded | PartDone
    | ReasoningDelta | ReasoningDone | OutputTextDelta | OutputTextDone | ArgumentsDelta | ArgumentsDone
    | CustomInputDelta | InputDone
)  # fmt: skip  # Events of a stream.
