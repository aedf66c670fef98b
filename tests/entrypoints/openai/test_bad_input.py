# SPDX-License-Identifier: Apache-2.0
"""Every kind of bad input: the right status, OpenAI's shape, the field's name, and a server that goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
NESTED: Any = "leaf"
for _ in range(100):
    NESTED = [NESTED]
LEAKS = ("0x", "/home", "site-packages", "Traceback", "Error(", "pydantic", "<class")


def check_error(response: httpx.Response, status: int, param: str | None) -> str:
    """The one shape of errors; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] in (status, "context_length_exceeded")
    assert error["type"].endswith("Error")
    assert error["param"] == param
    assert error["message"]
    assert not any(leak in error["message"] for leak in LEAKS)
    return str(error["message"])


COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 1024, "n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**20 - 1}, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids.0"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [258]}, "allowed_token_ids"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"echo": 1}, "echo"),
    ({"priority": 1}, "priority"),
    ({"priority": 2**64 - 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "n": 0}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids.0"),
    ({"logprob_token_ids": []}, "logprob_token_ids"),
    ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs"),
    ({"logprob_token_ids": [1], "echo": True}, "logprob_token_ids"),
    ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern": 3}}, "repetition_detection.max_pattern"),
    (
        {"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
        "repetition_detection.max_pattern_size",
    ),
    ({"stream_interval": 0}, "stream_interval"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"vllm_xargs": {"a": 2**64}}, "vllm_xargs"),
    ({"use_beam_search": 0}, "use_beam_search"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format"),
    ({"guided_json": {"type": "x"}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"], "regex": "a"}, "regex"),
    ({"guided_json": {}, "guided_whitespace_pattern": "x"}, "guided_json"),
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    ({"messages": HI}, "messages"),
]


@pytest.mark.item(1, 2, 3, 4, 5, 6, 7)
@folded(("fields", "param"), COMPLETION_CASES, ids=lambda value: str(value)[:50])
async def test_completions(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "hi", **fields})
    message = check_error(response, 400, param)
    assert param.split(".")[0] in message
    assert len(message) < 400
    assert not engine.running
    assert (await client.post(COMPLETIONS, json={"prompt": "hi"})).status_code == 200


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[].prefix"),
    ({"messages": [{"role": ["user"], "content": "x", "name": "y"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}]},
     "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": ""}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}]},
     "messages.0.tool_calls.0.id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
     "messages.0.tool_calls.0"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "web", "function": {"name": "f"}}]}]},
     "messages.0.tool_calls.0.type"),
    ({"messages": [{"role": "user", "content": "x", "name": [{"type": "text", "text": "y"}]}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "boom"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 4096}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": 5}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
     "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "other"}]}},
     "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
      "tool_choice": "required"}, "tools.0.function.parameters"),
    ({"tools": [TOOL], "response_format": {"type": "structural_tag", "format": {"type": "x"}}},
     "response_format"),
    ({"tools": [TOOL], "tool_choice": "whatever"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions.1.name"),
    ({"functions": [{"description": "f"}]}, "functions.0.name"),
    (
        {"functions": [{"name": "f", "parameters": {"type": "array"}, "strict": True}]},
        "functions.0.parameters",
    ),
    ({"functions": [{"name": "f"}], "function_call": "always"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"function": "f"}}, "function_call"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{"role": "function", "content": "1"}]}, "messages.0.name"),
    ({"messages": [*HI, {"role": "assistant", "function_call": "f"}]}, "messages.1.function_call"),
    (
        {"messages": [*HI, {"role": "user", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages.1.function_call",
    ),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"prompt": "hi"}, "prompt"),
]  # fmt: skip


@pytest.mark.item(1, 16, 19)
@folded(("fields", "param"), CHAT_CASES, ids=lambda value: str(value)[:50])
async def test_chat(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json={"messages": HI, **fields})
    message = check_error(response, 400, param)
    assert param.split(".")[0].removesuffix("[]") in message
    assert not engine.running


async def test_refusal_of_the_template_is_in_the_reply(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "boom"}]})
    assert "no booms here" in check_error(response, 400, "messages")


JSON = {"content-type": "application/json"}
BODIES: list[tuple[bytes, str]] = [
    (b"", "the body is empty"),
    (b"{", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'{"prompt": "hi", "temperature": NaN}', "NaN"),
    (b'{"prompt": "hi", "temperature": -Infinity}', "-Infinity"),
    (b'{"prompt": "hi", "temperature": 1e309}', "beyond the range"),
    (b'{"prompt": "hi", "prompt": "ho"}', "repeated key"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": "hi", "\\udfff": 1}', "surrogate"),
    (b'{"prompt": "hi", "seed": ' + b"9" * 100_000 + b"}", "digits"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"prompt": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", "nested"),
    (json.dumps({"prompt": NESTED}).encode(), "nested"),
]  # fmt: skip


@pytest.mark.item(3, 10)
@folded(("body", "reason"), BODIES, ids=lambda value: str(value)[:30])
async def test_malformed_json(client: httpx.AsyncClient, body: bytes, reason: str) -> None:
    start = time.process_time()
    response = await client.post(COMPLETIONS, content=body, headers=JSON)
    assert time.process_time() - start < 1.0
    assert reason in check_error(response, 400, None)


@pytest.mark.item(8)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/xml"},
        {"content-type": "multipart/form-data"},
        {**JSON, "content-encoding": "br"},
        {**JSON, "content-encoding": "gzip, gzip"},
    ],
)
async def test_wrong_media_type(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    check_error(await client.post(COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers), 415, None)


async def test_charset_is_no_other_media_type(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers)).status_code == 200


@pytest.mark.item(20)
async def test_unknown_model_path_and_method(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"model": "other", "prompt": "hi"})
    assert "fake-model" in check_error(response, 404, "model")
    long_name = await client.post(CHAT, json={"model": "../" * 5000, "messages": HI})
    assert len(check_error(long_name, 404, "model")) < 300
    check_error(await client.get("/v1/models/other"), 404, "model")
    check_error(await client.get("/nowhere"), 404, None)
    check_error(await client.get(COMPLETIONS), 405, None)
    check_error(await client.request("FOO123", COMPLETIONS), 405, None)


@pytest.mark.item(8)
async def test_body_limit(engine: FakeEngine) -> None:
    async with client_for(engine, max_request_bytes=2000) as client:
        fits = json.dumps({"prompt": "x" * (2000 - len('{"prompt": ""}'))}).encode()
        assert len(fits) == 2000
        assert (await client.post(COMPLETIONS, content=fits, headers=JSON)).status_code == 200
        check_error(await client.post(COMPLETIONS, content=fits + b" ", headers=JSON), 413, None)


@pytest.mark.item(8)
async def test_body_limit_counts_received_bytes(engine: FakeEngine) -> None:
    num_sent = 0

    async def endless():  # type: ignore[no-untyped-def]
        nonlocal num_sent
        while True:
            num_sent += 1
            assert num_sent < 100, "the server reads on past the limit"
            yield b"x" * 1000

    async with client_for(engine, max_request_bytes=10_000) as client:
        check_error(await client.post(COMPLETIONS, content=endless(), headers=JSON), 413, None)
    assert num_sent <= 12


@pytest.mark.item(24)
async def test_unexpected_error_reveals_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(prompt: str, index: int) -> str:
        raise RuntimeError("secret /home/someone/key at 0x7f")

    engine.reply = explode
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI, "stream": True})):
        response = await client.post(path, json=body)
        message = check_error(response, 500, None)
        assert response.headers["x-request-id"] in message
        assert "secret" not in message
        assert "secret" in caplog.text
        caplog.clear()
