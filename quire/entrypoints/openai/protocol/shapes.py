# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of objects in requests that are checked by hand, for the OpenAPI document.

Each schema states exactly what the reader named beside it accepts; null always means absent.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.chat.messages import PASSED_FIELDS, ROLES, TEXT_PARTS, THOUGHT_PARTS
from quire.entrypoints.chat.template import OWN_VARIABLES
from quire.entrypoints.openai.protocol.media_shapes import media_parts

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
MAX_MESSAGES = 4096
# Value of `include` that requests logprobs in the Responses API.
INCLUDED_LOGPROBS = "message.output_text.logprobs"

JSON_OBJECT_TEXT: Schema = {**TEXT, "contentMediaType": "application/json"}
# `constraints.constraint_of`
JSON_SCHEMA: Schema = {"type": ["object", "boolean"]}
PATTERN: Schema = {**TEXT, "pattern": r"^[^\u0000]*$"}
GRAMMAR: Schema = {**PATTERN, "minLength": 1}
_FLAGS = {
    "disable_any_whitespace": {"type": "boolean"},
    "disable_additional_properties": {"type": "boolean"},
    "whitespace_pattern": PATTERN,
}
# `prompts.split_prompts`
MAX_PROMPTS = 1024
_PROMPT_TEXT: Schema = {**TEXT, "minLength": 1}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def optional(schema: Schema) -> Schema:
    return any_of(schema, NULL)


def array(items: Schema, **keywords: Any) -> Schema:
    return {"type": "array", "items": items, **keywords}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def object_of(required: Schema, others: Schema | None = None) -> Schema:
    """Return an object schema; `others` are optional fields, and further ones are ignored and noted."""
    more = {name: optional(schema) for name, schema in (others or {}).items()}
    return {"type": "object", "properties": {**required, **more}, "required": list(required)}


def text_parts(names: dict[str, str]) -> Schema:
    """Return the schema of text parts, from type to the field that holds the text."""
    fields = sorted(set(names.values()))
    return any_of(
        *(
            object_of({"type": enum(*(kind for kind, own in names.items() if own == field)), field: TEXT})
            for field in fields
        )
    )


# Checked by `chat.tool_schemas` for strict tools; patterns, since the rest of a schema is the client's own.
PARAMETERS: Schema = {
    "type": "object",
    "patternProperties": {
        "^type$": any_of(enum("object", None), {"type": "array", "contains": enum("object")}),
        "^properties$": optional({"type": "object", "additionalProperties": {"type": ["object", "boolean"]}}),
        "^required$": optional(array(TEXT)),
    },
}


def read_if_strict(schema: Schema, name: str = "parameters") -> Schema:
    """Return a tool's schema whose arguments' schema, in the field `name`, must match `PARAMETERS` if strict."""
    lenient = {"properties": {"strict": enum(False, None)}}
    return {**schema, "anyOf": [lenient, {"properties": {name: optional(PARAMETERS)}}]}


LOOSE_FUNCTION = object_of(
    {"name": {**TEXT, "minLength": 1, "maxLength": 256}},
    {"description": TEXT, "parameters": {"type": "object"}, "strict": {"type": "boolean"}},
)
FUNCTION = read_if_strict(LOOSE_FUNCTION)
CUSTOM = object_of(
    {"name": {**TEXT, "minLength": 1, "maxLength": 256}}, {"description": TEXT, "format": {"type": "object"}}
)


def other_type(*types: str) -> Schema:
    """Return the schema of a type that is none of these."""
    return {**TEXT, "minLength": 1, "not": enum(*types)}


def _tools(function: Schema) -> Schema:
    return array(
        any_of(
            object_of({"type": enum("function"), "function": function}, {"custom": CUSTOM}),
            object_of({"type": enum("custom"), "custom": CUSTOM}, {"function": LOOSE_FUNCTION}),
            object_of(
                {"type": other_type("function", "custom")}, {"function": LOOSE_FUNCTION, "custom": CUSTOM}
            ),
        )
    )


TOOLS = _tools(FUNCTION)
# Checked by `OfferedTool` and `tool_choice.resolve_tools`; loose where no call is requested.
LOOSE_TOOLS = _tools(LOOSE_FUNCTION)

# `chat.messages.checked_messages`
_PARTS = (text_parts(TEXT_PARTS), *media_parts())
CONTENT = any_of(TEXT, array(any_of(TEXT, *_PARTS)))
_THOUGHT = any_of(TEXT, array(any_of(TEXT, object_of({"text": TEXT}, {"type": {}}))))
_THOUGHTS = [
    object_of({"type": enum(kind)}, dict.fromkeys(names, _THOUGHT)) for kind, names in THOUGHT_PARTS.items()
]
ASSISTANT_CONTENT = any_of(TEXT, array(any_of(TEXT, *_PARTS, *_THOUGHTS)))
CALLED = object_of({"name": TEXT}, {"arguments": {}})


def _unread(*names: str) -> Schema:
    """Return the schema of a call's unused field, whose inner fields still have rules."""
    known, plain = object_of({}, {name: {} for name in names}), {"type": ["string", "number", "boolean"]}
    return any_of(plain, known, array(any_of({**plain, "type": [*plain["type"], "array", "null"]}, known)))


TOOL_CALL = any_of(
    object_of(
        {"function": CALLED}, {"id": TEXT, "type": enum("function"), "custom": _unread("name", "input")}
    ),
    object_of(
        {"type": enum("custom"), "custom": object_of({"name": TEXT}, {"input": {}})},
        {"id": TEXT, "function": _unread("name", "arguments")},
    ),
)
NAMES = dict.fromkeys([*sorted(PASSED_FIELDS - {"name"}), "refusal"], TEXT)
_NO_CALLS: Schema = {"tool_calls": array({}, maxItems=0), "function_call": NULL}
MESSAGE = any_of(
    object_of(
        {
            "role": enum(*(role for role in ROLES if role not in ("assistant", "tool"))),
            "content": optional(CONTENT),
        },
        {**NAMES, **_NO_CALLS, "name": TEXT},
    ),
    object_of({"role": enum("tool")}, {**NAMES, **_NO_CALLS, "name": TEXT, "content": CONTENT}),
    object_of(
        {"role": enum("assistant")},
        {
            **NAMES,
            "name": TEXT,
            "content": ASSISTANT_CONTENT,
            "tool_calls": array(TOOL_CALL),
            "function_call": NULL,
        },
    ),
    object_of(
        {"role": enum("assistant"), "function_call": CALLED},
        {**NAMES, "name": TEXT, "content": ASSISTANT_CONTENT, "tool_calls": array({}, maxItems=0)},
    ),
    object_of({"role": enum("function"), "name": TEXT}, {**NAMES, **_NO_CALLS, "content": CONTENT}),
)
MESSAGES = array(MESSAGE, minItems=1, maxItems=MAX_MESSAGES)

# `tool_choice.resolve_tools` and `tool_choice.tools_in_use`
_NAMED = object_of({"name": TEXT})
_ALLOWED = array(
    any_of(
        object_of({"function": _NAMED}, {"type": enum("function")}),
        object_of({"type": enum("custom"), "custom": _NAMED}),
        object_of({"name": TEXT}, {"type": enum("function"), "function": NULL}),
        object_of({"type": enum("custom"), "name": TEXT}, {"custom": NULL}),
        object_of({"type": other_type("function", "custom")}),
    )
)
_MODE = {"mode": enum("auto", "required")}
TOOL_CHOICE = any_of(
    enum("auto", "none", "required", None),
    object_of({"function": _NAMED}, {"type": enum("function")}),
    object_of({"type": enum("custom"), "custom": _NAMED}),
    object_of({"name": TEXT}, {"type": enum("function"), "function": NULL}),
    object_of({"type": enum("custom"), "name": TEXT}, {"custom": NULL}),
    object_of({"type": enum("allowed_tools"), "allowed_tools": object_of({"tools": _ALLOWED}, _MODE)}),
    object_of({"type": enum("allowed_tools"), "tools": _ALLOWED}, {**_MODE, "allowed_tools": NULL}),
)
FUNCTION_CALL = any_of(
    enum("auto", "none", None), {**object_of({"name": TEXT}), "additionalProperties": False}
)  # Checked by `chat_prompt.translate`.

SCHEMA_OR_TEXT = any_of({"type": "object"}, JSON_OBJECT_TEXT)
_NAMED_SCHEMA = object_of(
    {"schema": JSON_SCHEMA}, {"name": TEXT, "description": TEXT, "strict": {"type": "boolean"}}
)
RESPONSE_FORMAT = any_of(
    object_of({"type": enum("text")}),
    object_of({"type": enum("json_object")}, {"schema": JSON_SCHEMA}),
    object_of({"type": enum("json_schema"), "json_schema": _NAMED_SCHEMA}),
    object_of({"type": enum("structural_tag"), "format": {"type": "object"}}),
    object_of({"type": enum("grammar"), "grammar": GRAMMAR}),
    object_of({"type": enum("regex"), "pattern": PATTERN}),
)
CHOICE = array({**TEXT, "minLength": 1}, minItems=1)
STRUCTURED_OUTPUTS = any_of(
    *(
        {**object_of({name: schema}, _FLAGS), "additionalProperties": False}
        for name, schema in {
            "json": any_of(JSON_SCHEMA, JSON_OBJECT_TEXT),
            "regex": PATTERN,
            "choice": CHOICE,
            "grammar": GRAMMAR,
            "json_object": enum(True),
            "structural_tag": SCHEMA_OR_TEXT,
        }.items()
    )
)  # A constraint and its options; whether it can be enforced is known after compilation.

# `chat_prompt.chat_prompt`
DOCUMENTS: Schema = {**optional(array({"type": "object"})), "x-rule": "documents_of_chats"}
TEMPLATE_OPTIONS: Schema = {"type": "object", "propertyNames": {"not": enum(*sorted(OWN_VARIABLES))}}

# `sampling.completion_params`
COMPLETION_MAX_TOKENS: Schema = {**optional({"type": "integer"}), "x-rule": "completion_max_tokens"}

_TOKEN_IDS = array({"type": "integer"}, minItems=1)
PROMPT = any_of(
    _PROMPT_TEXT, _TOKEN_IDS, array(any_of(_PROMPT_TEXT, _TOKEN_IDS), minItems=1, maxItems=MAX_PROMPTS)
)
