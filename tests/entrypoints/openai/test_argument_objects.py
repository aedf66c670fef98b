# SPDX-License-Identifier: Apache-2.0
"""APIs that give arguments as objects give what the model wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

HI = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"big": 1e400,\n "exact": 0.10000000000000000001, "deep": {"a": [1, "ü\\n"]}}'
SENT = '{"big":1e400,"exact":0.10000000000000000001,"deep":{"a":[1,"ü\\n"]}}'
MESSAGES: dict[str, Any] = {"messages": HI, "max_tokens": 999, "tools": [{"name": "f", "input_schema": {}}]}
OLLAMA: dict[str, Any] = {
    "model": "fake-model",
    "messages": HI,
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.reply = lambda prompt, index: f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'
    return engine


@pytest.mark.parametrize("stream", [False, True])
async def test_ollama_gives_the_numbers_of_the_model_on_one_line(engine: FakeEngine, stream: bool) -> None:
    async with client_for(engine) as client:
        response = await client.post("/api/chat", json={**OLLAMA, "stream": stream})
    assert f'"arguments":{SENT}' in response.text
    assert all(json.loads(line)["model"] == "fake-model" for line in response.text.splitlines())


async def test_messages_give_the_numbers_of_the_model(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        whole = await client.post("/v1/messages", json=MESSAGES)
        stream = await client.post("/v1/messages", json={**MESSAGES, "stream": True})
    assert f'"input":{SENT}' in whole.text
    assert '"input":{}' in stream.text
    data = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
    deltas = [
        event["delta"].get("partial_json", "") for event in data if event["type"] == "content_block_delta"
    ]
    assert "".join(deltas) == ARGUMENTS
