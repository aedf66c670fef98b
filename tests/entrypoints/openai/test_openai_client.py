# SPDX-License-Identifier: Apache-2.0
"""The stock `openai` client against a live server, and the snippets that the server prints."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shlex

import httpx
import openai
import pytest

from quire.entrypoints.openai.greeting import (
    CHAT,
    COMPLETION,
    Greeting,
    base_url,
    curl_example,
    python_example,
    ready_text,
)
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import live_server

HI = [{"role": "user", "content": "hi"}]


async def test_openai_client(engine: FakeEngine) -> None:
    async with (
        live_server(engine) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client,
    ):
        chat = await client.chat.completions.create(model="fake-model", messages=HI, n=2, logprobs=True)  # type: ignore[arg-type]
        assert [choice.message.content for choice in chat.choices] == ["Reply 0!", "Reply 1!"]
        assert chat.choices[0].logprobs.content[0].token == "R"
        text = ""
        async for chunk in await client.chat.completions.create(
            model="fake-model",
            messages=HI,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += (
                (chunk.choices[0].delta.content or "")
                if chunk.choices
                else f" {chunk.usage.completion_tokens}"
            )
        assert text == "Reply 0! 9"
        completion = await client.completions.create(model="fake-model", prompt=["a", "b"], max_tokens=5)
        assert [choice.text for choice in completion.choices] == ["Reply"] * 2
        assert [model.id async for model in client.models.list()] == ["fake-model"]
        assert (await client.models.retrieve("fake-model")).id == "fake-model"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="fake-model", messages=HI, temperature=9)  # type: ignore[arg-type]
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)  # type: ignore[arg-type]


async def test_client_sees_the_error_in_a_stream(engine: FakeEngine) -> None:
    engine.fail_after = 2
    async with (
        live_server(engine) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client,
    ):
        chunks = await client.chat.completions.create(model="fake-model", messages=HI, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="failed in the engine"):
            async for _ in chunks:
                pass


@pytest.mark.parametrize("greeting", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("key", [None, "it's a key"])
async def test_printed_snippets_work(
    engine: FakeEngine, greeting: Greeting, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv("QUIRE_API_KEY", key)
    async with live_server(engine) as server:
        needs_key = key is not None
        python = python_example(server.url, "fake-model", greeting, needs_key=needs_key)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            await asyncio.to_thread(exec, compile(python, "snippet", "exec"), {})
        assert printed.getvalue().endswith("Reply 0!\n")
        curl = curl_example(server.url, "fake-model", greeting, needs_key=needs_key)
        response = await _run_curl(curl, {"QUIRE_API_KEY": key or ""})
        assert "Reply 0!" in response.text
        text = ready_text(server.url, "fake-model", greeting, needs_key=needs_key)
        assert python in text
        assert curl in text


async def _run_curl(command: str, environment: dict[str, str]) -> httpx.Response:
    """Does what the shell and curl would do with this command."""
    for name, value in environment.items():
        command = command.replace(f"${name}", value)
    program, url, *options = shlex.split(command.replace("\\\n", " "))
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert program == "curl"
    headers = dict(value.split(": ", 1) for flag, value in pairs if flag == "-H")
    (data,) = [value for flag, value in pairs if flag == "-d"]
    async with httpx.AsyncClient() as client:
        return await client.post(url, headers=headers, content=data)


def test_curl_example_quotes_the_model_name() -> None:
    curl = curl_example("http://x", 'it\'s "odd"', CHAT, needs_key=False)
    data = shlex.split(curl.replace("\\\n", " "))[-1]
    assert json.loads(data)["model"] == 'it\'s "odd"'


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_base_url(host: str, url: str) -> None:
    assert base_url(host, 80) == url
