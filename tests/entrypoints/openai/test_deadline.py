# SPDX-License-Identifier: Apache-2.0
"""A request beyond its deadline ends with its text so far, or with an error that names the deadline."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
from quire.errors import DeadlineError
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for, stream

COMPLETION: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})
CHAT: tuple[str, dict[str, Any]] = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "hi"}]},
)
ROUTES = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])


@pytest.mark.item(36)
@ROUTES
async def test_deadline_field_overrides_header_and_header_the_server(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with client_for(engine, request_timeout=9.0) as client:
        await client.post(path, json={**body, "timeout": 2}, headers={"x-request-timeout": "5"})
        await client.post(path, json=body, headers={"x-request-timeout": "5"})
        await client.post(path, json=body)
    async with client_for(engine) as client:
        await client.post(path, json=body)
    given = [None if timeout is None else math.ceil(timeout) for timeout in engine.timeouts]
    assert given == [2, 5, 9, None]


@ROUTES
async def test_a_bad_deadline_is_refused(path: str, body: dict[str, Any]) -> None:
    async with client_for(FakeEngine()) as client:
        for timeout in (0, -1, "5", True):
            response = await client.post(path, json={**body, "timeout": timeout})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")
        for header in ("0", "-1", "nan", "inf", "soon", ""):
            response = await client.post(path, json=body, headers={"x-request-timeout": header})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout"), header
        unused = await client.post(path, json={**body, "timeout": 5}, headers={"x-request-timeout": "soon"})
        assert unused.status_code == 400


@ROUTES
async def test_a_text_that_is_cut_short_ends_as_if_at_its_length(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.late_after = 3
    async with client_for(engine) as client:
        whole = (await client.post(path, json=body)).json()["choices"][0]
        chunks = await stream(client, path, **body)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", "timeout")
    assert "Rep" in (whole.get("text"), whole.get("message", {}).get("content"))
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "timeout")


@pytest.mark.item(36)
@ROUTES
@pytest.mark.parametrize("streamed", [False, True])
async def test_deadline_without_text_is_an_error_not_retried(
    path: str, body: dict[str, Any], streamed: bool
) -> None:
    engine = FakeEngine()
    engine.late_after = 0
    async with client_for(engine) as client:
        response = await client.post(path, json={**body, "stream": streamed})
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert response.json()["error"]["type"] == "DeadlineExceededError"


LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
RENDERS_LONG = "{% for m in messages %}{% if m.content == 'loop' %}" + LOOP + "{% endif %}{% endfor %}"


class SlowTokenizer(FakeTokenizer):
    """Takes its time over long texts."""

    def encode(self, text: str, **options: Any) -> list[int]:
        time.sleep(0.3 if len(text) > 5000 else 0)
        return super().encode(text, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "loop"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 5}),
        ("/v1/completions", {"prompt": "hi " * 2000, "truncate_prompt_tokens": 9}),
    ],
)
async def test_time_runs_while_the_prompt_is_made(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(SlowTokenizer(RENDERS_LONG))
    async with client_for(engine) as client:
        response = await client.post(path, json=body, headers={"x-request-timeout": "0.1"})
        assert (response.status_code, engine.timeouts) == (504, [])
        assert response.headers["x-should-retry"] == "false"


def test_time_left_of_a_request_shrinks() -> None:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], timeout=60.0)
    first, second = request.time_left(), request.time_left()
    assert first is not None
    assert second is not None
    assert second <= first < 60
    request.timeout = 1e-9
    with pytest.raises(DeadlineError):
        request.time_left()
