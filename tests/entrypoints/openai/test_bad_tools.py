# SPDX-License-Identifier: Apache-2.0
"""Everything that can be wrong about tools, on every API: a 400 that names the field and its index."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.entrypoints.chat.formats.syntax import JsonCall, NamedJson
from quire.entrypoints.chat.formats.tools import FORMATS
from quire.entrypoints.chat.tool_schemas import PLAIN_NAME, check_names
from quire.errors import ValidationError
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded
from tests.fixtures.quick import quick

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
PATHS = (CHAT, RESPONSES, MESSAGES, OLLAMA)
HI = {"role": "user", "content": "hi"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
LIMIT = 3


def tool(path: str, name: Any = "f", schema: Any = OBJECT) -> dict[str, Any]:
    if path == RESPONSES:
        return {"type": "function", "name": name, "parameters": schema}
    if path == MESSAGES:
        return {"name": name, "input_schema": schema}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request that is good, but for these fields."""
    conversation = {"input": "hi"} if path == RESPONSES else {"messages": [HI]}
    more = {MESSAGES: {"max_tokens": 9}, OLLAMA: {"model": "fake-model", "stream": False}}.get(path, {})
    return {**conversation, **more, **fields}


def inner(path: str) -> str:
    """Return the path between a tool and its name."""
    return "function." if path in (CHAT, OLLAMA) else ""


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(FakeEngine(), max_tools=LIMIT) as client:
        yield client


async def refused(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The message and, where the API has one, the param."""
    response = await client.post(path, json=body(path, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return (error, "") if isinstance(error, str) else (error["message"], error.get("param") or "")


async def check(client: httpx.AsyncClient, path: str, fields: dict[str, Any], where: str) -> None:
    message, param = await refused(client, path, fields)
    assert where in message
    assert param in ("", where)
    assert (await client.post(path, json=body(path))).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_two_tools_of_one_name(client: httpx.AsyncClient, path: str) -> None:
    tools = [tool(path), tool(path, "g"), tool(path)]
    await check(client, path, {"tools": tools}, f"tools.2.{inner(path)}name")


@pytest.mark.parametrize("path", PATHS)
async def test_more_tools_than_the_limit(client: httpx.AsyncClient, path: str) -> None:
    tools = [tool(path, f"f{index}") for index in range(LIMIT + 1)]
    message, param = await refused(client, path, {"tools": tools})
    assert (message, param in ("", "tools")) == ("tools has 4 tools, the limit is 3", True)


@folded("path", PATHS)
@folded("schema", ["x", [], {"type": "array"}, {"type": 5}], ids=str)
async def test_invalid_tool_schema_is_refused(client: httpx.AsyncClient, path: str, schema: Any) -> None:
    message, param = await refused(
        client, path, {"tools": [tool(path, "g"), strict(tool(path, "f", schema))]}
    )
    assert "tools.1" in message
    assert not param or param.startswith("tools.1")


@folded("path", PATHS)
@folded(
    ("schema", "where"),
    [
        ({"properties": []}, "properties"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"properties": {}, "required": "a"}, "required"),
        ({"properties": {}, "required": [1]}, "required"),
    ],
    ids=str,
)
async def test_invalid_subschema_is_refused(
    client: httpx.AsyncClient, path: str, schema: Any, where: str
) -> None:
    name = "input_schema" if path == MESSAGES else f"{inner(path)}parameters"
    await check(client, path, {"tools": [strict(tool(path, "f", schema))]}, f"tools.0.{name}.{where}")


@folded("path", PATHS)
@folded(
    "schema",
    [
        {"type": "object", "properties": None, "required": None},
        {"type": None},
        {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
        {"type": "string"},
        {"properties": {"a": {}}, "required": "a"},
        {"properties": []},
    ],
    ids=str,
)
async def test_malformed_schema_of_lenient_tool_costs_no_answer(
    client: httpx.AsyncClient, path: str, schema: Any
) -> None:
    """Programs in Go write an empty list as null; such a tool is offered, and its arguments may be any."""
    tools = [tool(path, "g"), tool(path, "f", schema)]
    response = await client.post(path, json=body(path, tools=tools))
    assert response.status_code == 200, response.text


@folded("path", PATHS)
@folded("name", [None, 5, "", ["f"]], ids=str)
async def test_invalid_tool_name_is_refused(client: httpx.AsyncClient, path: str, name: Any) -> None:
    message, param = await refused(client, path, {"tools": [tool(path, name)]})
    assert "tools.0" in message
    assert not param or param.startswith("tools.0")


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "function", "function": {"name": "nobody"}}),
        (RESPONSES, {"type": "function", "name": "nobody"}),
        (MESSAGES, {"type": "tool", "name": "nobody"}),
    ],
)
async def test_choice_of_an_absent_tool_is_refused(
    client: httpx.AsyncClient, path: str, choice: dict[str, Any]
) -> None:
    await check(client, path, {"tools": [tool(path)], "tool_choice": choice}, "tool_choice")


@folded("thought", [5, {"a": 1}, [1]], ids=str)
@folded(
    ("path", "where"),
    [
        (CHAT, "messages.1.reasoning"),
        (RESPONSES, "input.1.content"),
        (MESSAGES, "messages.1.content.0.thinking"),
        (OLLAMA, "messages.1.thinking"),
    ],
)
async def test_earlier_reasoning_of_the_wrong_type(
    client: httpx.AsyncClient, path: str, where: str, thought: Any
) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "4"}
    messages = {
        CHAT: [HI, {**turn, "reasoning": thought}],
        MESSAGES: [HI, {**turn, "content": [{"type": "thinking", "thinking": thought}]}],
        OLLAMA: [HI, {**turn, "thinking": thought}],
    }
    items = [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]},
    ]
    fields = {"input": items} if path == RESPONSES else {"messages": messages[path]}
    message, param = await refused(client, path, fields)
    assert where in message
    assert not param or param.startswith(where)


@pytest.mark.parametrize("path", PATHS)
async def test_a_name_that_the_format_cannot_hold(path: str) -> None:
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser="qwen3_coder") as client:
        tools = [tool(path), tool(path, "a b>")]
        await check(client, path, {"tools": tools}, f"tools.1.{inner(path)}name")


@folded("row", FORMATS, ids=lambda row: row.name)
def test_every_format_allows_plain_names_and_declares_others(row: Any) -> None:
    for name in ("f", "get_weather", "F2_", "_"):
        assert PLAIN_NAME.fullmatch(name)
    check_names(["get_weather", "F2_", "get-weather"], row)
    odd = ["f", 'a"<|{}>\n(b']
    if isinstance(row.calls[0], JsonCall | NamedJson):  # its names are strings
        check_names(odd, row)
        return
    with pytest.raises(ValidationError, match=r"tools\.1\.function\.name") as refusal:
        check_names(odd, row)
    assert row.name in refusal.value.message


def described(inner: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": inner}, **more}


OVERLAP = {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer"}]}
NOT_ENFORCED: list[tuple[str, dict[str, Any], str]] = [
    ("hermes", described({"not": {}}), "/properties/x/not"),
    ("hermes", described({"$ref": "#/$defs/y"}, **{"$defs": {"y": {"contains": {}}}}), "/$defs/y/contains"),
    ("hermes", described({"items": OVERLAP}), "/properties/x/items"),
    ("hermes", described({}, uniqueItems=True), "/uniqueItems"),
    ("mistral", described({"items": {"uniqueItems": True}}), "/properties/x/items/uniqueItems"),
    ("qwen3_coder", described({"type": "array", "items": {"not": {}}}), "/properties/x/items/not"),
    ("qwen3_coder", described({"type": "array", "items": OVERLAP}), "/properties/x/items"),
    ("qwen3_coder", described({"type": "string", "not": {}}), "/properties/x"),
    (
        "qwen3_coder",
        described({"type": "array", "items": {"$ref": "#/$defs/y"}}, **{"$defs": {"y": {"if": {}, "then": {}}}}),
        "/$defs/y/if",
    ),
    ("pythonic", described(described({"type": "array", "items": {"not": {}}})), "/properties/x/properties/x/items"),
    ("pythonic", described({"type": "integer", "minimum": "x"}), "/properties/x/minimum"),
    ("functiongemma", described({"anyOf": [{"type": "null"}, {"not": {}}]}), "/properties/x/anyOf/1"),
    ("glm45", described({}, patternProperties={"a": {}}), "/"),
]  # fmt: skip


@folded(("parser", "schema", "place"), NOT_ENFORCED, ids=str)
async def test_schema_that_is_not_enforced_is_reported_by_its_place(
    parser: str, schema: dict[str, Any], place: str
) -> None:
    """On every API as the client sent it, wherever in the grammar of the format it ends up."""
    choices: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser=parser) as client:
        for path, choice in choices.items():
            tools = [tool(path), tool(path, "g"), strict(tool(path, "h", schema))]
            name = "input_schema" if path == MESSAGES else f"{inner(path)}parameters"
            where = f"tools.2.{name}"
            message, param = await refused(client, path, {"tools": tools, "tool_choice": choice})
            assert message.startswith(f"{where} at {place}: "), message
            assert param in ("", where)
        functions = [{"name": "f"}, {"name": "g", "parameters": schema, "strict": True}]
        old = {"functions": functions, "function_call": {"name": "g"}}
        message, param = await refused(client, CHAT, old)
        assert message.startswith(f"functions.1.parameters at {place}: "), message
        assert param == "functions.1.parameters"


def strict(one: dict[str, Any], value: bool = True) -> dict[str, Any]:
    """A tool with `strict`, where its API has that."""
    if "function" in one:
        return {**one, "function": {**one["function"], "strict": value}}
    return {**one, "strict": value}


ODD: list[tuple[str, dict[str, Any]]] = [
    ("lookahead", described({"type": "string", "pattern": "^(?=a).*$"})),
    ("draft 4", described({"type": "number", "minimum": 0, "exclusiveMinimum": True})),
    ("not", described({"not": {"type": "string"}})),
    ("remote", described({"$ref": "https://example.com/schema.json"})),
    ("itself", described({"$ref": "#/$defs/A"}, required=["x"], **{"$defs": {"A": {"$ref": "#/$defs/A"}}})),
    ("without end", described({"$ref": "#"}, required=["x"])),
    ("contradiction", described({"type": "string", "minLength": 5, "maxLength": 2}, required=["x"])),
    ("compiler", described({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, required=["x"])),
    ("nothing", described({"enum": []}, required=["x"])),
    ("false", described({}, required=["y"], additionalProperties=False)),
    ("no type", {"anyOf": [{"required": ["x"]}, {"required": ["y"]}], "properties": {"x": {}, "y": {}}}),
    ("odd name", {"type": "object", "properties": {"a b>": {"type": "string"}}, "required": ["a b>"]}),
]
WITH_CHOICE: dict[str, list[Any]] = {
    CHAT: ["required", {"type": "function", "function": {"name": "h"}}],
    RESPONSES: ["required", {"type": "function", "name": "h"}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "h"}],
}


@pytest.mark.parametrize(
    "parser", quick(["hermes", "qwen3_coder", "pythonic", "mistral", "openai"], ["qwen3_coder", "openai"])
)
@folded(("what", "schema"), ODD, ids=[what for what, _ in ODD])
async def test_odd_schema_costs_its_tool_the_constraint(
    parser: str, what: str, schema: dict[str, Any]
) -> None:
    good = described({"type": "integer", "minimum": 41}, required=["x"])
    async with client_for(engine := FakeEngine(FakeTokenizer()), tool_call_parser=parser) as client:
        for path, choices in WITH_CHOICE.items():
            for choice, value in itertools.product(choices, (None, False)):
                odd = tool(path, "h", schema)
                tools = [tool(path), tool(path, "g", good), odd if value is None else strict(odd, value)]
                response = await client.post(path, json=body(path, tools=tools, tool_choice=choice))
                assert response.status_code == 200, response.text
                constraint = engine.seen[-1][1].structured_outputs
                if choice == choices[0]:
                    assert "41" in constraint.structural_tag
                noted = response.json().get("adjusted", {})
                if value is False:
                    assert noted == {}
                elif what not in ("no type", "odd name"):  # which some formats can enforce
                    assert noted == {f"tools[2].{inner(path)}strict": False}


@folded(("what", "schema"), ODD[:10], ids=[what for what, _ in ODD[:10]])
async def test_odd_schema_of_strict_tool_is_refused(what: str, schema: dict[str, Any]) -> None:
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        for path, choices in WITH_CHOICE.items():
            tools = [tool(path), strict(tool(path, "h", schema))]
            name = "input_schema" if path == MESSAGES else f"{inner(path)}parameters"
            for choice in choices:
                message, _ = await refused(client, path, {"tools": tools, "tool_choice": choice})
                assert message.startswith(f"tools.1.{name} at /"), message


async def test_tool_choice_any_of_mistrals_clients_is_required() -> None:
    async with client_for(engine := FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        for choice in ("required", "any"):
            response = await client.post(CHAT, json=body(CHAT, tools=[tool(CHAT)], tool_choice=choice))
            assert response.status_code == 200, response.text
        first, second = (seen[1].structured_outputs for seen in engine.seen[-2:])
        assert first == second is not None


async def test_arguments_that_may_be_null_are_an_object() -> None:
    schema = {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    async with client_for(engine := FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        for path, choices in WITH_CHOICE.items():
            tools = [strict(tool(path, "h", schema))]
            response = await client.post(path, json=body(path, tools=tools, tool_choice=choices[0]))
            assert response.status_code == 200, response.text
            assert '"null"' not in engine.seen[-1][1].structured_outputs.structural_tag


async def test_tokens_of_request_with_odd_schema_are_counted() -> None:
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        for _, schema in ODD:
            fields = {
                "messages": [HI],
                "tools": [tool(MESSAGES, "h", schema)],
                "tool_choice": {"type": "any"},
            }
            response = await client.post(f"{MESSAGES}/count_tokens", json=fields)
            assert response.status_code == 200, response.text


async def test_many_odd_schemas_cost_no_answer() -> None:
    odd = described({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, required=["x"])
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        tools = [tool(CHAT, f"f{index}", {**odd, "title": str(index)}) for index in range(12)]
        response = await client.post(CHAT, json=body(CHAT, tools=tools, tool_choice="required"))
        assert response.status_code == 200, response.text
        assert len(response.json()["adjusted"]) == 12


async def test_schemas_that_are_too_large_together_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.json_schema.schema.MAX_SCHEMA_BYTES", 2000)
    large = described({"type": "string", "description": "x" * 150})
    async with client_for(FakeEngine(FakeTokenizer()), tool_call_parser="hermes") as client:
        tools = [tool(CHAT, f"f{index}", large) for index in range(5)]
        response = await client.post(CHAT, json=body(CHAT, tools=tools, tool_choice="required"))
        assert response.status_code == 200, response.text
        assert len(response.json()["adjusted"]) == 5


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
async def test_lenient_function_is_constrained_where_enforceable(parser: str) -> None:
    """A required call of a lenient function, as LlamaIndex sends, is constrained if possible and never refused."""
    async with client_for(engine := FakeEngine(FakeTokenizer()), tool_call_parser=parser) as client:
        for schema, is_kept in ((described({"type": "integer"}), True), (described({"not": {}}), False)):
            lenient = tool(CHAT, "f", schema)
            lenient["function"]["strict"] = False
            request = body(CHAT, tools=[lenient], tool_choice="required")
            assert (await client.post(CHAT, json=request)).status_code == 200
            constraint = engine.seen[-1][1].structured_outputs
            assert ('"integer"' in constraint.structural_tag) == is_kept
