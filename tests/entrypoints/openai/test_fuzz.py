# SPDX-License-Identifier: Apache-2.0
"""Random requests: always an answer in a documented shape, never a 5xx, and nothing left running."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.entrypoints.openai.parsing import MAX_DEPTH, parse_json
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, CompletionRequest
from quire.errors import ClientError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, events

SETTINGS = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), database=None
)
odd = st.sampled_from(
    [0, 1, 2, -1, 3.5, 1e300, -0.0, 10**19, True, False, None, "", "x", "é\0", [], [1], ["a"], [[]], [None], {},
     {"a": 1}, {"1": 2.5}, [{"role": "user", "content": "hi"}], [{"role": "tool", "content": []}], "auto",
     {"type": "text"}, [{"type": "function", "function": {"name": "f"}}], {"include_usage": True},
     {"shout": 1}, 300, -(2**63)]
)  # fmt: skip
chat_fields = st.sampled_from([*ChatCompletionRequest.model_fields, "response_format", "user", "unheard_of"])
adapter_fields = st.sampled_from(["lora_name", "lora_path", "load_inplace", "unheard_of"])
adapter_values = st.sampled_from(["a", "b", "fake-model", "/bad", "..", "a/b", "~nobody/x", True])
completion_fields = st.sampled_from([*CompletionRequest.model_fields, "best_of", "suffix", "metadata"])


def check(path: str, base: dict[str, Any], fields: dict[str, Any]) -> None:
    async def send() -> None:
        engine = FakeEngine()
        async with client_for(engine) as client:
            response = await client.post(path, json={**base, **fields})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]
        elif fields.get("stream"):
            *chunks, done = events(response.text)
            reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
            assert sum(reason is not None for reason in reasons) == (fields.get("n") or 1) * _num_prompts(
                fields
            )
            assert done == "[DONE]"
        assert not engine.running

    asyncio.run(send())


def _num_prompts(fields: dict[str, Any]) -> int:
    prompt = fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


@pytest.mark.item(57, 58)
@SETTINGS
@given(
    changes=st.lists(
        st.tuples(st.booleans(), st.dictionaries(adapter_fields, st.one_of(odd, adapter_values))), max_size=6
    )
)
def test_changes_of_adapters(changes: list[tuple[bool, dict[str, Any]]]) -> None:
    async def send() -> None:
        engine = FakeEngine(enable_lora=True)
        async with client_for(engine, admin_api_key="admin") as client:
            client.headers["authorization"] = "Bearer admin"
            for loads, body in changes:
                path = f"/v1/{'load' if loads else 'unload'}_lora_adapter"
                response = await client.post(path, json=body)
                assert response.status_code in (200, 400, 404), response.text
            models = (await client.get("/v1/models")).json()["data"]
        served = {adapter.lora_name for adapter in engine.loras}
        assert {model["id"] for model in models} <= {"fake-model", *served}

    asyncio.run(send())


@pytest.mark.item(57, 58)
@SETTINGS
@given(fields=st.dictionaries(completion_fields, odd, max_size=4))
def test_completions(fields: dict[str, Any]) -> None:
    check("/v1/completions", {"prompt": "hi"}, fields)


@pytest.mark.item(57, 58)
@SETTINGS
@given(fields=st.dictionaries(chat_fields, odd, max_size=4))
def test_chat(fields: dict[str, Any]) -> None:
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, fields)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@SETTINGS
@given(value=st.dictionaries(st.text(), json_values, max_size=4), ascii_only=st.booleans())
def test_valid_json_is_read_as_it_is(value: dict[str, Any], ascii_only: bool) -> None:
    try:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert parse_json(body) == value


@pytest.mark.item(10, 58)
@SETTINGS
@given(body=st.binary(max_size=60) | st.text('{}[]":,\\u019eEd-.naN ', max_size=40).map(str.encode))
def test_anything_else_is_a_client_error(body: bytes) -> None:
    try:
        value = parse_json(body)
    except ClientError:
        return
    assert value == json.loads(body)


def test_depth_limit_is_exact() -> None:
    for depth, fits in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        body = b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)
        try:
            parse_json(body)
        except ClientError:
            assert not fits
        else:
            assert fits
