# SPDX-License-Identifier: Apache-2.0
"""Tests of a request's cost before admission: early refusals by counts, and work beside the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.config import DEMO_MODEL, EngineConfig, ServerConfig
from quire.engine import prompt_forms, tokenizer
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai import parsing
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.parsing import parse_json
from quire.errors import ValidationError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import CheckedClient, client_for
from tests.entrypoints.openai.test_disconnect import Client
from tests.fixtures.folded import folded

LONG = "word " * 2000
BYTES_FOR_ONE_OF_TEXT = 30
"""Of memory, while a list of short texts is read, checked and refused."""
TAKES_MINUTES = {"type": "integer", "multipleOf": 99_998_300}
BODIES_OF_ONE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
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
async def test_requests_that_only_count_tokens_need_free_memory() -> None:
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
            may_go_on.wait(300)
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
    assert len(large) > parsing.THREAD_ABOVE_BYTES
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
def test_bodies_of_too_many_values_are_refused_before_parsing(
    body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "_DECODER", None)
    with pytest.raises(ValidationError, match=f"holds more than .* {reason}"):
        parse_json(body)


@folded("text", ["[{,", '"', "\\", '\\"', '\\\\"[', "[\\"])
def test_brackets_inside_texts_are_not_counted(text: str) -> None:
    body = {"a": text * 400_000, "b": [text] * 5, text: 1}
    assert parse_json(json.dumps(body).encode()) == body


@pytest.mark.item(4)
async def test_lists_of_a_request_are_bounded_over_all_prompts() -> None:
    async with client_for(FakeEngine()) as client:
        for prompts, status in ((1024, 400), (1023, 200)):
            body = {"prompt": [[1]] * prompts, "allowed_token_ids": [1] * 1025, "max_tokens": 1}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "allowed_token_ids"
                assert "1025 token ids" in response.json()["error"]["message"]


TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "n": 10**6}),
    ("/v1/completions", {"prompt": "hi", "best_of": 10**6}),
    ("/v1/completions", {"prompt": ["x"] * 50_000}),
    ("/v1/completions", {"prompt": [[1]] * 50_000}),
    ("/v1/completions", {"prompt": ["x" * 1000] * 1000, "n": 1000}),
    ("/v1/completions", {"prompt": ["x"] * 1000, "stop": ["y" * 10**5]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 10**6}),
]


@pytest.mark.item(4)
@pytest.mark.parametrize(("path", "body"), TOO_MUCH, ids=lambda value: str(value)[:40])
async def test_too_much_is_refused_for_the_price_of_its_text(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tokenized, nothing comes to the engine, and no more memory is taken than parsing needs."""
    engine = FakeEngine()
    must_not_run: Callable[..., Any] = lambda *args, **kwargs: pytest.fail("it was tokenized")  # noqa: E731
    sent = json.dumps(body).encode()
    async with client_for(engine) as client:
        await client.post(path, json=BODIES_OF_ONE[path])  # what is made once
        monkeypatch.setattr(engine.tokenizer, "encode", must_not_run)
        engine.seen.clear()
        tracemalloc.start()
        try:
            response = await client.post(path, content=sent, headers={"content-type": "application/json"})
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert response.status_code == 400, response.text
    assert not engine.seen
    assert most < 2**20 + BYTES_FOR_ONE_OF_TEXT * len(sent)


@pytest.mark.item(10)
async def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not done before another request is answered."""
    may_go_on, has_waited = threading.Event(), []

    def parse(body: bytes) -> Any:
        has_waited.append(may_go_on.wait(300))
        return parse_json(body)

    body = {"prompt": "hi", "metadata": {"text": "x" * parsing.THREAD_ABOVE_BYTES}}
    async with client_for(FakeEngine()) as client:
        monkeypatch.setattr(parsing, "parse_json", parse)
        large = asyncio.create_task(client.post("/v1/completions", json=body))
        assert (await client.get("/health")).status_code == 200
        assert not large.done()
        may_go_on.set()
        assert (await large).status_code == 200
    assert has_waited == [True], "it waited on the event loop"


@pytest.mark.item(13)
async def test_endless_constraint_delays_no_stream() -> None:
    """They are all over before it has been compiled, or given up, and a client that leaves takes it along."""
    args = {"distributed_executor_backend": "null", "num_gpu_blocks_override": 200}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    await engine.wait_ready()
    app = build_app(engine, ServerConfig())
    form = {"type": "json_schema", "json_schema": {"schema": TAKES_MINUTES}}
    hostile = Client("/v1/completions", {"prompt": "hi", "response_format": form})
    waiting = asyncio.create_task(app(hostile.scope, hostile.receive, hostile.send))
    while not engine.input_processor.constraints._checker._busy:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)
    async with CheckedClient(app) as client:
        body = {"prompt": "hi", "stream": True, "max_tokens": 20, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert not waiting.done()
    hostile.gone.set()
    await asyncio.wait_for(waiting, 30)
    assert not hostile.sent
    await engine.shutdown()


@pytest.mark.item(9)
async def test_heads_are_bounded() -> None:
    async with client_for(FakeEngine(), api_key=("key",)) as client:
        many = [(f"x-{number}", "v") for number in range(129)]
        for headers in (many, [("x-large", "v" * 2**15)]):
            response = await client.get("/health", headers=headers)
            assert response.status_code == 431
            assert response.json()["error"]["type"] == "RequestHeaderFieldsTooLargeError"
        assert (await client.get("/health", headers=[("x-large", "v" * 2**14)])).status_code == 200
