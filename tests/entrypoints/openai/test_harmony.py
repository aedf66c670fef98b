# SPDX-License-Identifier: Apache-2.0
"""Test of chat requests to a Harmony model: the constraints made from their fields and tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}functions.{% endif %}<|start|>assistant{# <|channel|>analysis #}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "strict": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
CALL, FINAL = "commentary to=functions.", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("fields", "calls", "final"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, True, False),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            True,
            False,
        ),
        ({"tools": [TOOL]}, True, True),
        ({"tools": [TOOL], "response_format": FORM}, True, True),
        ({"response_format": FORM}, False, True),
    ],
    ids=["required", "named", "strict", "form or calls", "form"],
)
async def test_a_request_becomes_messages(fields: dict[str, Any], calls: bool, final: bool) -> None:
    engine = FakeEngine(FakeTokenizer(TEMPLATE))
    async with client_for(engine) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields}
        )
    assert reply.status_code == 200, reply.text
    tag = str(engine.seen[-1][1].structured_outputs.structural_tag)
    assert "<|channel|>analysis<|message|>" in tag
    assert (CALL in tag, FINAL in tag) == (calls, final)
