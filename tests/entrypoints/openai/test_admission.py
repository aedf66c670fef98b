"""What a request may cost before it is admitted: refused early, by numbers, and beside the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.engine import prompt_forms, tokenizer
from quire.entrypoints.openai import json_body
from quire.entrypoints.openai.json_body import parse_json
from quire.errors import ValidationError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

LONG = "word " * 2000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]}
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["short", LONG]}),
    ("/v1/chat/completions", CHAT),
]


@pytest.mark.parametrize(("path", "body"), PROMPTS)
@pytest.mark.parametrize("truncated", [False, True])
async def test_a_text_that_cannot_fit_is_not_tokenized(
    path: str, body: dict[str, Any], truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine.tokenizer, "min_num_tokens", len)
    if truncated:
        body = {**body, "truncate_prompt_tokens": 10, "max_tokens": 2}
    else:
        must_not_run: Callable[..., Any] = lambda *args, **kwargs: pytest.fail("it was tokenized")  # noqa: E731
        monkeypatch.setattr(engine.tokenizer, "encode", must_not_run)
    async with client_for(engine) as client:
        response = await client.post(path, json=body)
    if truncated:
        assert response.status_code == 200, response.text
    else:
        assert response.status_code == 400
        assert "at least 10" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == ("messages" if "messages" in body else "prompt")


CUT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 8}),
    ("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 8}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", CHAT),
]


@pytest.mark.item(28)
@pytest.mark.parametrize(("path", "body"), CUT)
async def test_a_text_that_is_cut_or_counted_is_bounded(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(prompt_forms, "LEAST_CUT_CHARS", 5000)
    monkeypatch.setattr(prompt_forms, "CUT_CHARS_PER_TOKEN", 2)
    async with client_for(engine) as client:
        refused = await client.post(path, json=body)
        monkeypatch.setattr(prompt_forms, "CUT_CHARS_PER_TOKEN", 3)
        taken = await client.post(path, json=body)
    assert (refused.status_code, taken.status_code) == (400, 200), taken.text
    error, field = refused.json()["error"], "messages" if "messages" in body else "prompt"
    assert error["param"] == field
    assert re.match(
        f"there are 10.* characters in the {field}; .* there may be 8192: 2 for each", error["message"]
    )


@pytest.mark.item(28, 52)
async def test_what_only_counts_asks_for_memory() -> None:
    engine = FakeEngine()
    bodies = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [65]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    }
    async with client_for(engine) as client:
        for path, body in bodies.items():
            engine.is_short_of_memory = False
            assert (await client.post(path, json=body)).status_code == 200
            engine.is_short_of_memory = True
            refused = await client.post(path, json=body)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)


@pytest.mark.item(28)
@pytest.mark.parametrize(("path", "body"), CUT)
async def test_no_long_text_is_tokenized_on_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = FakeEngine(), set[str]()
    encode = engine.tokenizer.encode  # type: ignore[union-attr]

    def watched(*args: Any, **kwargs: Any) -> list[int]:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return encode(*args, **kwargs)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    async with client_for(engine) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert threads == {"quire-tokenize"}


@pytest.mark.item(30)
async def test_requests_without_long_texts_pass_many_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads that tokenize are all taken until the short answers are there."""
    monkeypatch.setattr(tokenizer, "_THREADS", ThreadPoolExecutor(1))
    engine, may_go_on = FakeEngine(), threading.Event()

    def slow(text: str, **kwargs: Any) -> list[int]:
        if len(text) > 1000:
            may_go_on.wait(2)
        return [1]

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    async with client_for(engine) as client:
        long = [asyncio.create_task(client.post("/v1/completions", json={"prompt": LONG})) for _ in range(50)]
        await asyncio.sleep(0.05)
        large = json.dumps({"prompt": list(range(200)) * 18}, indent=20).encode()
        headers = {"content-type": "application/json"}
        answers = [await client.post("/v1/completions", content=large, headers=headers) for _ in range(3)]
        answers.append(await client.post("/v1/completions", json={"prompt": "short"}))
        num_done = sum(task.done() for task in long)
        may_go_on.set()
        answers += await asyncio.gather(*long)
    assert len(large) > json_body.THREAD_ABOVE_BYTES
    assert num_done == 0
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.item(10)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": [' + b"[]," * 2**17 + b"1]}", "lists and objects"),
        (b'{"a": [' + b"{}," * 2**17 + b"1]}", "lists and objects"),
        (b'{"a": [' + b"1," * 2**20 + b"1]}", "values"),
        (b'{"a": [' + b'"",' * 2**20 + b"1]}", "values"),
        (b'{"a": ' + b'"",' * 2**22 + b"1}", "values"),
    ],
)
def test_bodies_of_too_many_values_are_refused_before_they_are_parsed(
    body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "_DECODER", None)
    with pytest.raises(ValidationError, match=f"holds more than .* {reason}"):
        parse_json(body)


@pytest.mark.parametrize("text", ["[{,", '"', "\\", '\\"', '\\\\"[', "[\\"])
def test_what_a_text_holds_is_not_counted(text: str) -> None:
    body = {"a": text * 400_000, "b": [text] * 5, text: 1}
    assert parse_json(json.dumps(body).encode()) == body


@pytest.mark.item(4)
async def test_what_a_request_lists_is_bounded_over_all_its_prompts() -> None:
    async with client_for(FakeEngine()) as client:
        for prompts, status in ((1024, 400), (1023, 200)):
            body = {"prompt": [[1]] * prompts, "allowed_token_ids": [1] * 1025, "max_tokens": 1}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "allowed_token_ids"
                assert "1025 token ids" in response.json()["error"]["message"]


@pytest.mark.item(9)
async def test_heads_are_bounded() -> None:
    async with client_for(FakeEngine(), api_key=("key",)) as client:
        many = [(f"x-{number}", "v") for number in range(129)]
        for headers in (many, [("x-large", "v" * 2**15)]):
            response = await client.get("/health", headers=headers)
            assert response.status_code == 431
            assert response.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"
        assert (await client.get("/health", headers=[("x-large", "v" * 2**14)])).status_code == 200
