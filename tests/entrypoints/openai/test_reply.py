# SPDX-License-Identifier: Apache-2.0
"""Tests of a reply's parts beside its text: usage, timings, lowered limits; and a chunk for every step."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, stream

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ROUTES = pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})]
)
TIMINGS = {"queue_s": 0.5, "prefill_s": 1.0, "decode_s": 2.0, "tokens_per_s": 4.0}


@pytest.mark.item(39)
@ROUTES
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_last_object_has_usage_and_timings(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    engine.num_cached_tokens = 1
    whole = (await client.post(path, json=body)).json()
    *chunks, last = await stream(client, path, **body, **options)
    assert whole["timings"] == last["timings"] == TIMINGS
    assert whole["usage"] == last["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert not any("timings" in chunk or chunk.get("usage") for chunk in chunks)
    assert bool(last["choices"]) == (not options), "usage that was asked for has a chunk of its own"


@ROUTES
async def test_only_the_chunk_that_ends_the_last_choice_is_the_last(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.reply = lambda prompt, index: "x" * (3 - index)
    chunks = await stream(client, path, **body, n=3)
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["usage"]["completion_tokens"] == 4 + 3 + 2


@ROUTES
@pytest.mark.parametrize("text", ["€", "", "a<tool_call>"])
async def test_every_step_of_every_choice_is_a_chunk(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], text: str
) -> None:
    engine.reply = lambda prompt, index: text
    options = {"include_usage": True, "continuous_usage_stats": True}
    num_prompt_tokens = (await client.post(path, json=body)).json()["usage"]["prompt_tokens"]
    chunks = await stream(client, path, **body, n=2, stream_options=options)
    num_openings = 2 if path == CHAT else 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    num_tokens = 2 * (len(text.encode()) + 1)
    assert counts == [0] * num_openings + [*range(1, num_tokens + 1), num_tokens]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {num_prompt_tokens}


async def test_all_prompts_are_counted_from_the_first_chunk_on(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, COMPLETIONS, prompt=["ab", "cde"], stream_options=options)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


@ROUTES
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_limit_above_the_room_is_lowered_and_reported(
    engine: FakeEngine, path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    engine.reply = lambda prompt, index: "x" * 5000
    async with client_for(engine) as client:
        usage = (await client.post(path, json={**body, "max_tokens": 1})).json()["usage"]
        response = await client.post(path, json={**body, "max_tokens": 4096})
        last = (await stream(client, path, **body, max_tokens=4096))[-1] if is_streamed else response.json()
    room = 4096 - usage["prompt_tokens"]
    assert last["adjusted"] == {"max_tokens": room}
    assert response.headers["x-quire-adjusted-fields"] == f"max_tokens={room}"
    assert last["usage"]["completion_tokens"] == room
    assert last["choices"][0]["finish_reason"] == "length"


async def test_lowered_limit_is_reported_by_the_clients_name(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": HI, "max_completion_tokens": 4096}
    assert (await client.post(CHAT, json=body)).json()["adjusted"].keys() == {"max_completion_tokens"}
    fits = (await client.post(CHAT, json={"messages": HI, "max_tokens": 50})).json()
    assert "adjusted" not in fits
    two = (await client.post(COMPLETIONS, json={"prompt": ["a", "abc"], "max_tokens": 4096})).json()
    assert two["adjusted"] == {"max_tokens": 4093}


async def test_refused_request_lowers_no_limit(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": HI, "max_tokens": 4096, "temperature": -1})
    assert response.status_code == 400
    assert "x-quire-adjusted-fields" not in response.headers


async def test_generation_config_limit_never_refuses_a_request() -> None:
    engine = FakeEngine(override_generation_config={"max_new_tokens": 10**6})
    engine.input_processor.update_config(engine.config)
    async with client_for(engine) as client:
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200


@ROUTES
async def test_overflow_error_has_its_code_and_text(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    field = "prompt" if path == COMPLETIONS else "messages"
    text = "x" * 5000
    long = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    for options in ({}, {"stream": True}, {"max_tokens": 5}):
        response = await client.post(path, json={**long, **options})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            field,
        )
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")
        assert f"tokens in the {field}" in error["message"]
        assert "prompt is too long" in error["message"]  # by which LangChain knows it


@ROUTES
@pytest.mark.parametrize("max_tokens", [4097, 32000, 2**63 - 1])
async def test_max_tokens_beyond_the_context_is_adjusted(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], max_tokens: int
) -> None:
    """Clients send the budget of the model that they were made for; Claude Code sends 32,000."""
    reply = (await client.post(path, json={**body, "max_tokens": max_tokens})).json()
    assert 4000 < reply["adjusted"]["max_tokens"] < 4096


async def test_best_of_gives_the_likeliest_and_counts_all(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.mean_logprob = lambda index: (-3.0, -1.0, -2.0)[index]
    body = (await client.post(COMPLETIONS, json={"prompt": "hi", "best_of": 3, "n": 2})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "Reply 1!"),
        (1, "Reply 2!"),
    ]
    assert body["usage"]["completion_tokens"] == 27
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_without_new_tokens_scores_the_prompt(
    client: httpx.AsyncClient, is_streamed: bool
) -> None:
    body = {"prompt": ["hi", "abc"], "echo": True, "max_tokens": 0, "logprobs": 1}
    if is_streamed:
        chunks = await stream(client, COMPLETIONS, **body)
        answer = {
            **chunks[-1],
            "choices": sorted((c["choices"][0] for c in chunks), key=lambda one: one["index"]),
        }
    else:
        answer = (await client.post(COMPLETIONS, json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi", "abc"]
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [["h", "i"], ["a", "b", "c"]]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert (answer["usage"]["completion_tokens"], answer["timings"]["tokens_per_s"]) == (0, 0.0)
