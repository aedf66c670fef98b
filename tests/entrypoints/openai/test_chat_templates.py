# SPDX-License-Identifier: Apache-2.0
"""Tests of the operator's chat template options, and of a model without a template."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
THINKS = TEMPLATE + "{% if enable_thinking %}THINK{% endif %}{% if style %}{{ style }}{% endif %}"
SHOWN = "{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}"


def prompt_of(engine: FakeEngine) -> str:
    return bytes(i for i in engine.seen[-1][0]["prompt_token_ids"] if i < 256).decode()


async def prompted(template: str, body: dict[str, Any], **options: Any) -> str:
    """The prompt of a chat request that is answered."""
    engine = FakeEngine(FakeTokenizer(template))
    async with client_for(engine, **options) as client:
        response = await client.post(CHAT, json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return prompt_of(engine)


@folded(
    ("template", "content_format", "prompt"),
    [
        (SHOWN, "auto", "user=hi;"),
        (SHOWN, "string", "user=hi;"),
        (SHOWN, "openai", "user=[{'type': 'text', 'text': 'hi'}];"),
        ("{{ messages[0].content[0].text }}", "auto", "hi"),
        ("{{ messages[0].content[0].text }}", "openai", "hi"),
        ("{{ messages[0].content[0] }}", "string", "h"),
    ],
)
async def test_operator_may_set_the_content_format(template: str, content_format: str, prompt: str) -> None:
    assert await prompted(template, {}, chat_template_content_format=content_format) == prompt


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"style": "brief"}}, True),
    ],
)
async def test_default_options_yield_to_those_of_a_request(body: dict[str, Any], thinks: bool) -> None:
    prompt = await prompted(THINKS, body, default_chat_template_kwargs={"enable_thinking": True})
    assert ("THINK" in prompt) == thinks


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (THINKS, {"enable_thinkin": True}, "has 'enable_thinkin', but .*enable_thinking"),
        (THINKS, {"messages": []}, "has 'messages'"),
        (None, {"enable_thinking": True}, "needs a model with a chat template"),
    ],
)
async def test_unread_default_template_options_fail_the_start(
    template: str | None, options: dict[str, Any], words: str
) -> None:
    engine = FakeEngine(FakeTokenizer(template))
    async with client_for(engine, default_chat_template_kwargs=options) as client:
        with pytest.raises(ConfigError, match=words):
            await client._transport.app.state.server.prepare()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (SHOWN, "system"),
        (SHOWN + "{% if messages[0].role == 'developer' %}{% endif %}", "developer"),
        (SHOWN + "{% if messages[0].role in ['system', 'developer'] %}{% endif %}", "developer"),
    ],
)
async def test_developer_role_becomes_the_templates_role(template: str, role: str) -> None:
    body = {"messages": [{"role": "developer", "content": "Be kind."}, *HI]}
    assert (await prompted(template, body)).startswith(f"{role}=Be kind.;")


async def test_documents_reach_a_template_that_has_a_place_for_them() -> None:
    body = {"documents": [{"title": "a", "text": "b"}]}
    template = "{% for document in documents %}{{ document.title }}: {{ document.text }}{% endfor %}"
    assert await prompted(template, body) == "a: b"


async def test_earlier_calls_results_and_reasoning_reach_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content }}|"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %};{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    body = {
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "1"},
        ]
    }
    assert await prompted(template, body) == "user:|hi|;assistant:Hm.||f5;tool:|1|;"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/api/chat", {"model": "fake-model", "messages": HI}),
    ],
)
async def test_model_without_template_completes_and_refuses_chats(path: str, fields: dict[str, Any]) -> None:
    async with client_for(FakeEngine(FakeTokenizer(None))) as client:
        response: httpx.Response = await client.post(path, json=fields)
        assert response.status_code == 400
        assert "the model has no chat template; start the server with --chat-template" in response.text
        completion = await client.post("/v1/completions", json={"prompt": "hi"})
        assert completion.json()["choices"][0]["text"] == "Reply 0!"
