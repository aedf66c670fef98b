# SPDX-License-Identifier: Apache-2.0
"""Ollama's requests and replies; UNSET fields are omitted.

Invariant: a line of a stream and a whole reply are one struct; only the one with `done` has the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema

from quire.entrypoints.chat.messages import ROLE_ALIASES, ROLES
from quire.entrypoints.ollama.options import OPTIONS_OBJECT
from quire.entrypoints.openai.field_rules import INNER, FieldRules
from quire.entrypoints.openai.protocol import shapes
from quire.entrypoints.openai.protocol.media_shapes import of_media
from quire.entrypoints.openai.protocol.relations import asks_nothing, either, has, is_true
from quire.entrypoints.openai.protocol.requests import Objects, RequestModel
from quire.entrypoints.openai.protocol.responses import Timings, TokenLogprob, Usage
from quire.entrypoints.openai.protocol.shapes import any_of, array, enum, object_of
from quire.errors import ValidationError

WITHOUT_EFFECT = ("keep_alive",)  # Without effect: the model stays loaded as long as the server runs.

CALL = FieldRules(
    frozenset({"id", "function"}), inner={"function": FieldRules(frozenset({"name", "arguments"}))}
)
MESSAGE = FieldRules(
    frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "name", "tool_call_id"}),
    inner={"tool_calls": CALL},
)

# Checked by `conversation.chat_turn` and `generate_turn`.
MODEL = {**shapes.TEXT, "x-rule": "tagged_model"}
_NOTHING = {"anyOf": [{"type": "array", "maxItems": 0}, shapes.NULL]}
FORMAT = any_of(enum("json", "", None), {"type": "object"})
CALLS = array(object_of({"function": shapes.CALLED}, {"id": shapes.TEXT}))
MESSAGE_FIELDS = {
    "content": shapes.CONTENT,
    "images": any_of(_NOTHING, of_media(array({**shapes.TEXT, "minLength": 1}))),
    "thinking": shapes.TEXT,
    "tool_name": shapes.TEXT,
    "name": shapes.TEXT,
    "tool_call_id": shapes.TEXT,
}
_UNTYPED = object_of({"function": shapes.FUNCTION}, {"type": enum(""), "custom": shapes.CUSTOM})
TOOLS = array(any_of(shapes.TOOLS["items"], _UNTYPED))
_NO_CALLS = {"tool_calls": array({}, maxItems=0)}
_NAMES = {name: MESSAGE_FIELDS[name] for name in ("name", "tool_name")}
MESSAGES = array(
    any_of(
        object_of({"role": enum(*ROLES, *ROLE_ALIASES)}, {**MESSAGE_FIELDS, **_NO_CALLS}),
        object_of(
            {"role": enum("assistant")},
            {**MESSAGE_FIELDS, "content": shapes.ASSISTANT_CONTENT, "tool_calls": CALLS},
        ),
        *(
            {
                **object_of({"role": enum("function")}, {**MESSAGE_FIELDS, **_NO_CALLS, name: text}),
                "required": ["role", name],
            }
            for name, text in _NAMES.items()
        ),
    ),
    maxItems=shapes.MAX_MESSAGES,
)

_NAMED = {**shapes.TEXT, "minLength": 1}


class TurnRequest(RequestModel):
    """Shared fields of /api/chat and /api/generate; unlike elsewhere, `stream` defaults to true."""

    inner: ClassVar[Mapping[str, FieldRules]] = {"messages": MESSAGE, "tools": INNER["tools"]}
    without_effect: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT
    samples: ClassVar[bool] = True
    relations: ClassVar[tuple[dict[str, Any], ...]] = (
        either(asks_nothing("top_logprobs"), is_true("logprobs")),
    )

    model: Annotated[str, Field(min_length=1), WithJsonSchema(MODEL)]
    stream: bool = True
    format: Annotated[str | dict[str, Any] | None, WithJsonSchema(FORMAT)] = None
    options: Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(OPTIONS_OBJECT))] = None
    logprobs: bool = False
    top_logprobs: int | None = None
    keep_alive: Any = None
    think: bool | str | None = None


class ChatRequest(TurnRequest):
    """POST /api/chat"""

    messages: Annotated[Objects, WithJsonSchema(MESSAGES)] = Field(default=[], max_length=shapes.MAX_MESSAGES)
    tools: Annotated[Objects | None, WithJsonSchema(shapes.optional(TOOLS))] = None


class GenerateRequest(TurnRequest):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    template: Annotated[str | None, WithJsonSchema(enum("", None))] = None
    images: Annotated[list[Any] | None, WithJsonSchema(_NOTHING)] = None
    context: Annotated[list[int] | None, WithJsonSchema(_NOTHING)] = None
    raw: bool = False


class NamedRequest(RequestModel):
    """Request that names a model in either way: `name` is the older name of `model`."""

    relations: ClassVar[tuple[dict[str, Any], ...]] = (either(has("model", _NAMED), has("name", _NAMED)),)

    model: str | None = None
    name: str | None = None

    def given_name(self) -> str:
        """Return the name.

        Raises:
            ValidationError: there is none.
        """
        name = self.model or self.name
        if not name:
            raise ValidationError("model is required", param="model")
        return name


class ShowRequest(NamedRequest):
    """POST /api/show"""

    model: Annotated[str | None, WithJsonSchema(any_of(MODEL, enum("", None)))] = None
    name: Annotated[str | None, WithJsonSchema(any_of(MODEL, enum("", None)))] = None
    verbose: bool = False


class CalledFunction(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class OllamaCall(msgspec.Struct):
    id: str
    function: CalledFunction


class TurnMessage(msgspec.Struct):
    content: str
    tool_calls: list[OllamaCall] | UnsetType = UNSET
    role: str = "assistant"
    thinking: str | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """One line: `message` for chat, `response` for generate; durations are in nanoseconds. `usage` and the fields after
    it are quire's own.
    """

    model: str
    created_at: str
    message: TurnMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class Details(msgspec.Struct):
    family: str
    families: list[str]
    quantization_level: str
    parameter_size: str = ""
    format: str = "safetensors"
    parent_model: str = ""


class ListedModel(msgspec.Struct, kw_only=True):
    """One name of the model; `size` is that of its weight files in bytes."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: Details
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModelList(msgspec.Struct):
    models: list[ListedModel]


class ShownModel(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """`version` is the implemented version of Ollama's API."""

    version: str
    quire: str
