# SPDX-License-Identifier: Apache-2.0
"""Requests of coding agents in the whole shape in which they are sent: two turns with tools, streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for, named_events

SYSTEM_FIRST = TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)
ALTERNATES = TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- set ns = namespace(turns=0) %}{%- for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('No system message here.') }}{% endif %}"
    "{% if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{% if (message.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% set ns.turns = ns.turns + 1 %}{% endif %}",
)
TEMPLATES = {
    "takes_system_anywhere": TEMPLATE,
    "wants_system_first": SYSTEM_FIRST,
    "wants_alternating_roles": ALTERNATES,
}
BASH_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "user-agent": "claude-cli/2.3.0 (external, cli)",
}
CLAUDE: dict[str, Any] = {
    "model": "fake-model",
    "max_tokens": 500,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.3.0"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": BASH_SCHEMA, "eager_input_streaming": True},
        {"name": "Later", "description": "", "input_schema": BASH_SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": "1" * 36})},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "xhigh"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "service_tier": "auto",
    "speed": "standard",
}  # fmt: skip
CLAUDE_FIRST: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>today</system-reminder>"},
                                 {"type": "text", "text": "List the files.", **CACHED}]},
    {"role": "system", "content": [{"type": "text", "text": "Use short sentences."}]},
]  # fmt: skip


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of the message that these events make, as a client puts them together."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            elif delta["type"] == "text_delta":
                block["text"] += delta["text"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


async def claude_turn(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counted = {name: CLAUDE[name] for name in ("model", "system", "tools", "thinking")}
    count = await client.post("/v1/messages/count_tokens?beta=true", json={**counted, "messages": messages})
    assert count.status_code == 200, count.text
    response = await client.post(
        "/v1/messages?beta=true", json={**CLAUDE, "messages": messages}, headers=CLAUDE_HEADERS
    )
    assert response.status_code == 200, response.text
    events = named_events(response.text)
    usage = events[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count.json()["input_tokens"]
    assert {"tools[].web_search_20250305", "context_management"} <= set(events[-2]["ignored"])
    return joined(events)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
async def test_claude_code_calls_a_tool_and_reads_its_result(template: str) -> None:
    engine = FakeEngine(FakeTokenizer(template))
    replies = ["I look." + CALL % ("Bash", '{"command": "ls"}'), "There is a.txt."]
    engine.reply = lambda prompt, index: replies[len(engine.seen) - 1]
    async with client_for(engine) as client:
        first = await claude_turn(client, CLAUDE_FIRST)
        text, call = first
        assert (text["text"], call["name"], call["input"]) == ("I look.", "Bash", {"command": "ls"})
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": "a.txt",
            "is_error": False,
            **CACHED,
        }
        turns = [
            *CLAUDE_FIRST,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, *first],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder/>"}]},
        ]
        second = await claude_turn(client, turns)
    assert second == [{"type": "text", "text": "There is a.txt."}]
    prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"], skip_special_tokens=False)
    for said in ("Use short sentences.", "You are a coding agent.", "List the files.", "a.txt"):
        assert prompt.count(said) == 1
    is_first = prompt.index("Use short sentences.") < prompt.index("List the files.")
    assert is_first == (template != TEMPLATE)
    assert "web_search" not in prompt


CODEX_HEADERS = {
    "originator": "codex_cli_rs", "session_id": "0199", "openai-beta": "responses=experimental",
    "accept": "text/event-stream", "user-agent": "codex_cli_rs/0.149.0",
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "fake-model",
    "instructions": "You are a coding agent.",
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
         "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"],
                        "additionalProperties": False}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}},
        {"type": "namespace", "name": "mcp__docs", "description": "Tools of docs.", "tools": [
            {"type": "function", "name": "search", "description": "Searches.", "strict": False, "defer_loading": True,
             "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}]},
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "safety_identifier": "me",
    "metadata": None,
}  # fmt: skip
CODEX_FIRST: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "<environment_context/>"}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
]


async def codex_turn(client: httpx.AsyncClient, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream of `response.output_item.done` gives, without what Codex does not send back."""
    response = await client.post("/v1/responses", json={**CODEX, "input": items}, headers=CODEX_HEADERS)
    assert response.status_code == 200, response.text
    events = named_events(response.text)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    ignored = events[-1]["response"]["ignored"]
    assert {"tools[].web_search", "tools[].image_generation", "tools[].tool_search", "text.verbosity"} <= set(
        ignored
    )
    return [{name: value for name, value in item.items() if name not in ("id", "status")} for item in done]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("exec_command", '{"cmd": "ls"}',
         {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}'}),
        ("mcp__docs__search", '{"q": "x"}',
         {"type": "function_call", "name": "search", "arguments": '{"q": "x"}', "namespace": "mcp__docs"}),
        ("apply_patch", '{"input": "*** Begin Patch\\n"}',
         {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch\n"}),
    ],
)  # fmt: skip
async def test_codex_calls_a_tool_and_reads_its_result(
    template: str, name: str, arguments: str, item: dict[str, Any]
) -> None:
    engine = FakeEngine(FakeTokenizer(template))
    replies = [CALL % (name, arguments), "Fixed."]
    engine.reply = lambda prompt, index: replies[len(engine.seen) - 1]
    async with client_for(engine) as client:
        (call,) = await codex_turn(client, CODEX_FIRST)
        call_id = call["call_id"]
        assert call == {**item, "call_id": call_id}
        result = {"type": f"{item['type']}_output", "call_id": call_id, "output": "the result"}
        (message,) = await codex_turn(client, [*CODEX_FIRST, call, result])
    assert message["content"][0]["text"] == "Fixed."
    prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"], skip_special_tokens=False)
    for said in ("You are a coding agent.", "Sandbox: none.", "Fix the bug.", "the result", "Searches."):
        assert prompt.count(said) == 1
