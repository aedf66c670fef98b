# SPDX-License-Identifier: Apache-2.0
"""Tools that are no functions: omitted and reported, or read as functions, on every API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.responses.tools import ResponseTools
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, events, named_events
from tests.entrypoints.openai.test_bad_tools import (
    CHAT,
    MESSAGES,
    OLLAMA,
    PATHS,
    RESPONSES,
    body,
    strict,
    tool,
)
from tests.fixtures.folded import folded

SERVERS = {
    CHAT: [{"type": "web_search"}, {"type": "anything", "x": {"y": 1}}, {"type": "mcp", "server_url": "u"}],
    RESPONSES: [
        {"type": "web_search", "external_web_access": False}, {"type": "web_search_preview"}, {"type": "local_shell"},
        {"type": "file_search", "vector_store_ids": ["v"]}, {"type": "image_generation", "output_format": "png"},
        {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "computer_use_preview"},
        {"type": "mcp", "server_label": "s", "require_approval": "never"}, {"type": "apply_patch"}, {"type": "shell"},
        {"type": "tool_search"}, {"type": "of tomorrow"},
    ],
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 9}, {"type": "mcp_toolset"},
    ],
    OLLAMA: [{"type": "web_search"}],
}  # fmt: skip
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def chosen(path: str, choice: str) -> dict[str, Any]:
    """The choice as the API has it; Ollama has none."""
    names = {"auto": "auto", "required": "any"}
    if path == OLLAMA:
        return {}
    return {"tool_choice": {"type": names[choice]} if path == MESSAGES else choice}


def told(response: httpx.Response) -> list[str]:
    return list(response.json().get("ignored", []))


@pytest.mark.parametrize("path", PATHS)
async def test_server_side_tools_are_omitted_and_reported(path: str) -> None:
    async with client_for(engine := FakeEngine()) as client:
        for server in SERVERS[path]:
            for choice in ("auto", "required"):
                request = body(path, tools=[server, tool(path, "g"), server], **chosen(path, choice))
                response = await client.post(path, json=request)
                assert response.status_code == 200, response.text
                assert f"tools[].{server['type']}" in told(response)
                prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
                assert '"name": "g"' in prompt
                assert server["type"] not in prompt
            alone = await client.post(path, json=body(path, tools=[server], **chosen(path, "auto")))
            assert alone.status_code == 200
            assert told(alone)[-1] == f"tools[].{server['type']}"
            if path == OLLAMA:
                continue
            refused = await client.post(path, json=body(path, tools=[server], **chosen(path, "required")))
            assert refused.status_code == 400
            assert server["type"] in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_errors_after_an_omitted_tool_name_the_right_one(path: str) -> None:
    async with client_for(FakeEngine()) as client:
        wrong = strict(tool(path, "g", {"type": "object", "properties": {"a": 5}}))
        tools = [SERVERS[path][0], tool(path), wrong]
        response = await client.post(path, json=body(path, tools=tools))
        assert response.status_code == 400
        error = response.json()["error"]
        assert "tools.2." in (error if isinstance(error, str) else error["message"])


async def test_a_tool_of_an_unknown_type_with_a_schema_is_the_clients() -> None:
    async with client_for(engine := FakeEngine()) as client:
        described = {"type": "of_tomorrow", "name": "f", "input_schema": {"type": "object"}}
        response = await client.post(MESSAGES, json=body(MESSAGES, tools=[described]))
        assert response.status_code == 200
        assert '"name": "f"' in engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])


@pytest.mark.parametrize("unknown", ["ignore", "reject"])
async def test_tools_of_servers_are_refused_where_fields_are(unknown: str) -> None:
    async with client_for(FakeEngine(), unknown_fields=unknown) as client:
        response = await client.post(RESPONSES, json=body(RESPONSES, tools=[{"type": "web_search"}]))
        assert response.status_code == (200 if unknown == "ignore" else 400)


CUSTOM = {
    "name": "patch",
    "description": "Apply a patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
INPUTS = [
    ('{"input": "*** Begin\\n+ä\\n"}', "*** Begin\n+ä\n"),
    ('{"patch": "text"}', "text"),
    ('{"input": 5}', '{"input": 5}'),
    ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
    ("{}", ""),
    ('{"input": null}', ""),
]


@folded(("arguments", "text"), INPUTS)
@folded("streamed", [False, True])
async def test_calls_of_custom_tools_have_text_in_responses(
    arguments: str, text: str, streamed: bool
) -> None:
    engine = FakeEngine()
    engine.reply = lambda prompt, index: CALL % ("patch", arguments)
    request = body(RESPONSES, tools=[tool(RESPONSES), {"type": "custom", **CUSTOM}], stream=streamed)
    async with client_for(engine) as client:
        response = await client.post(RESPONSES, json=request)
        assert response.status_code == 200, response.text
        sent = named_events(response.text) if streamed else []
        answer = sent[-1]["response"] if streamed else response.json()
        (item,) = answer["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
        assert answer["ignored"] == ["tools[].format"]
        prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
        assert "start: /x/" in prompt
        if streamed:
            kinds = [event["type"] for event in sent[2:-1]]
            assert kinds == [
                "response.output_item.added", "response.custom_tool_call_input.delta",
                "response.custom_tool_call_input.done", "response.output_item.done",
            ]  # fmt: skip
            assert sent[2]["item"]["input"] == ""
            assert sent[3]["delta"] == sent[4]["input"] == text
        turn = [{"role": "user", "content": "hi"}, item]
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        again = await client.post(RESPONSES, json={**request, "input": [*turn, result]})
        assert again.status_code == 200, again.text


@folded(("arguments", "text"), INPUTS)
async def test_calls_of_custom_tools_have_text_in_chat(arguments: str, text: str) -> None:
    engine = FakeEngine()
    engine.reply = lambda prompt, index: CALL % ("patch", arguments)
    choice = {"type": "custom", "custom": {"name": "patch"}}
    request = body(CHAT, tools=[tool(CHAT), {"type": "custom", "custom": CUSTOM}], tool_choice=choice)
    async with client_for(engine) as client:
        message = (await client.post(CHAT, json=request)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": text})
        chunks = events((await client.post(CHAT, json={**request, "stream": True})).text)
        calls = [call for chunk in chunks[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert [call["custom"]["input"] for call in calls] == [text]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        again = await client.post(CHAT, json={**request, "messages": [*request["messages"], message, result]})
        assert again.status_code == 200, again.text


def namespace(name: str, *names: str, **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": one, "description": f"{name} {one}"} for one in names]
    return {"type": "namespace", "name": name, "description": f"about {name}", "tools": tools, **more}


NAMESPACES = [
    tool(RESPONSES, "search"), {"type": "web_search"}, namespace("mcp__a", "search", "open"),
    namespace("mcp__b__", "search"), tool(RESPONSES, "mcp__a__open"),
]  # fmt: skip


@folded(
    ("written", "name", "where"),
    [
        ("search", "search", None),
        ("mcp__a__search", "search", "mcp__a"),
        ("mcp__a.search", "search", "mcp__a"),
        ("mcp__b__search", "search", "mcp__b__"),
        ("mcp__a__open", "mcp__a__open", None),
        ("mcp__a__open_2", "open", "mcp__a"),
        ("open", "open", "mcp__a"),
        ("nobody", "nobody", None),
    ],
)
async def test_calls_of_namespaces_come_back_with_their_names(
    written: str, name: str, where: str | None
) -> None:
    engine = FakeEngine()
    engine.reply = lambda prompt, index: CALL % (written, "{}")
    request = body(RESPONSES, tools=NAMESPACES)
    async with client_for(engine) as client:
        answer = (await client.post(RESPONSES, json=request)).json()
        (item,) = answer["output"]
        assert (item["type"], item["name"], item.get("namespace")) == ("function_call", name, where)
        events = named_events((await client.post(RESPONSES, json={**request, "stream": True})).text)
        assert (events[2]["item"]["name"], events[2]["item"].get("namespace")) == (name, where)
        turn = [{"role": "user", "content": "hi"}, item]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "42"}
        again = await client.post(RESPONSES, json={**request, "input": [*turn, result]})
        assert again.status_code == 200, again.text
    assert answer["ignored"] == ["tools[].web_search"]
    assert [one["type"] for one in answer["tools"]] == [one["type"] for one in NAMESPACES]


def test_names_for_the_model_are_distinct_and_lead_back() -> None:
    tools = ResponseTools(NAMESPACES, RequestNotes())
    shown = [one["function"]["name"] for one in tools.chat if "function" in one]
    assert sorted(shown) == ["mcp__a__open", "mcp__a__open_2", "mcp__a__search", "mcp__b__search", "search"]
    for name in shown:
        back = tools.called(name)
        assert tools.shown_name(back.name, back.namespace) == name
    (first,) = (
        one["function"] for one in tools.chat if one.get("function", {}).get("name") == "mcp__a__search"
    )
    assert first["description"] == "about mcp__a\n\nmcp__a search"


ALLOWED: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}, ["g"]),
    (CHAT, {"allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}},
                                                           {"type": "mcp"}]}}, ["g"]),
    (CHAT, {"mode": "required", "tools": [{"type": "function", "name": "f"}]}, ["f"]),
    (CHAT, {"allowed_tools": {"mode": "auto", "tools": []}}, []),
    (RESPONSES, {"mode": "auto", "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}]}, ["g"]),
    (RESPONSES, {"mode": "required", "tools": [{"type": "function", "name": "g"}, {"type": "mcp", "name": "s"}]},
     ["g"]),
    (RESPONSES, {"mode": "auto", "tools": [{"type": "image_generation"}]}, []),
]  # fmt: skip


@folded(("path", "choice", "names"), ALLOWED, ids=str)
async def test_the_model_sees_the_allowed_tools_alone(
    path: str, choice: dict[str, Any], names: list[str]
) -> None:
    async with client_for(engine := FakeEngine()) as client:
        tools = [tool(path), tool(path, "g")]
        request = body(path, tools=tools, tool_choice={"type": "allowed_tools", **choice})
        response = await client.post(path, json=request)
        assert response.status_code == 200, response.text
        prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
        assert [name for name in "fg" if f'"name": "{name}"' in prompt] == names
        mode = choice.get("allowed_tools", choice)["mode"]
        assert (engine.seen[-1][1].structured_outputs is not None) == (mode == "required")


async def test_a_namespace_may_be_allowed_or_one_of_its_tools_named() -> None:
    async with client_for(engine := FakeEngine()) as client:
        for choice in (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "namespace", "name": "mcp__b__"}],
            },
            {"type": "function", "name": "search", "namespace": "mcp__b__"},
            {"type": "function", "name": "mcp__b__search"},
        ):
            request = body(RESPONSES, tools=NAMESPACES, tool_choice=choice)
            response = await client.post(RESPONSES, json=request)
            assert response.status_code == 200, response.text
            constraint = engine.seen[-1][1].structured_outputs
            assert "mcp__b__search" in constraint.structural_tag.replace(r"\\u{5f}", "_")
            assert r"mcp\\u{5f}\\u{5f}a" not in constraint.structural_tag


ITEMS: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}, None),
    ({"type": "file_search_call", "id": "fs", "queries": ["q"], "results": None}, None),
    ({"type": "image_generation_call", "id": "ig", "result": "aaaa"}, None),
    ({"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": []}, None),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "click"}}, None),
    ({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}, None),
    ({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}, None),
    ({"type": "mcp_approval_request", "id": "m", "name": "f", "arguments": "{}"}, None),
    ({"type": "compaction", "encrypted_content": "x"}, None),
    ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, None),
    ({"type": "tool_search_call", "arguments": {}, "execution": "client"}, None),
    ({"type": "tool_search_output", "tools": []}, None),
    ({"type": "ghost_snapshot", "ghost_commit": {"id": "1"}}, None),
    ({"type": "mcp_call", "id": "m", "name": "fetch", "arguments": '{"u": 1}', "output": "page", "server_label": "s"},
     "page"),
    ({"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}}, None),
    ({"type": "local_shell_call_output", "id": "l", "output": "a.txt"}, "a.txt"),
    ({"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}}, None),
    ({"type": "shell_call_output", "call_id": "s", "output": [
        {"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 0}}]}, "out\nerr"),
    ({"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a"}}, None),
    ({"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "Done!"}, "Done!"),
    ({"type": "function_call_output", "call_id": "p", "output": None}, None),
    ({"type": "custom_tool_call", "call_id": "t", "name": "patch", "input": "x"}, None),
    ({"type": "custom_tool_call_output", "call_id": "t", "output": [{"type": "input_text", "text": "ok"}]}, "ok"),
]  # fmt: skip


@folded(("item", "text"), ITEMS, ids=lambda value: str(value)[:40])
async def test_items_of_every_kind_of_tool_are_taken(item: dict[str, Any], text: str | None) -> None:
    async with client_for(engine := FakeEngine()) as client:
        user = {"role": "user", "content": "hi"}
        response = await client.post(RESPONSES, json={"input": [user, item, user]})
        assert response.status_code == 200, response.text
        assert (text or "") in engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])


BLOCKS = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s",
        "content": [{"type": "web_search_result", "url": "u"}],
    },
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "x", "stdout": "1"}},
    {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    {"type": "container_upload", "file_id": "f"},
    {"type": "redacted_thinking", "data": "x"},
]


@folded("block", BLOCKS, ids=lambda block: block["type"])
async def test_anthropic_server_blocks_are_omitted_and_reported(block: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "So."}]}
    user = {"role": "user", "content": "hi"}
    async with client_for(FakeEngine()) as client:
        response = await client.post(MESSAGES, json=body(MESSAGES, messages=[user, turn, user]))
        assert response.status_code == 200, response.text
        assert f"messages[].content[].{block['type']}" in told(response)


async def test_texts_of_documents_and_search_results_reach_the_model() -> None:
    blocks = [
        {
            "type": "document",
            "title": "T1",
            "source": {"type": "text", "media_type": "text/plain", "data": "D1"},
        },
        {"type": "search_result", "title": "T2", "source": "S2", "content": [{"type": "text", "text": "D2"}]},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [blocks[1], {"type": "tool_reference", "tool_name": "t"}],
    }
    messages = [{"role": "user", "content": [*blocks, result]}]
    async with client_for(engine := FakeEngine()) as client:
        response = await client.post(MESSAGES, json=body(MESSAGES, messages=messages))
        assert response.status_code == 200, response.text
        prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
        assert "T1\nD1\nT2\nS2\nD2" in prompt
        pdf = {"type": "document", "source": {"type": "base64", "data": "eA=="}}
        refused = await client.post(
            MESSAGES, json=body(MESSAGES, messages=[{"role": "user", "content": [pdf]}])
        )
        assert refused.status_code == 400


def test_the_members_of_a_namespace_are_bounded_by_the_tools() -> None:
    """A namespace is no way around `--max-tools`: its members are tools of the chat request."""
    tools = ResponseTools([namespace("n", *(f"f{number}" for number in range(5)))], RequestNotes())
    assert len(tools.chat) == 5
    assert json.dumps(tools.chat).count('"n__f') == 5


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "g"},
        {"name": "g"},
        {"type": "function", "name": "g", "function": None},
        {"type": "function", "function": {"name": "g"}},
    ],
    ids=str,
)
async def test_chat_choice_names_a_function_flat_or_nested(choice: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.reply = lambda prompt, index: CALL % ("g", "{}")
    async with client_for(engine) as client:
        request = body(CHAT, tools=[tool(CHAT, "f"), tool(CHAT, "g")], tool_choice=choice)
        response = await client.post(CHAT, json=request)
        assert response.status_code == 200, response.text
        unknown = await client.post(CHAT, json={**request, "tool_choice": {"type": "function", "name": "h"}})
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "g"
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": ""}, {"type": "function"}], ids=str)
async def test_ollama_tool_without_type_is_a_function(kind: dict[str, Any]) -> None:
    engine = FakeEngine()
    described = tool(OLLAMA, "g")
    request = body(
        OLLAMA, tools=[{**{name: described[name] for name in described if name != "type"}, **kind}]
    )
    async with client_for(engine) as client:
        response = await client.post(OLLAMA, json=request)
    assert response.status_code == 200, response.text
    assert '"name": "g"' in engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
    assert "ignored" not in response.json()
