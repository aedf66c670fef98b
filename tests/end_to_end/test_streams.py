# SPDX-License-Identifier: Apache-2.0
"""Over HTTP, the chunks of any request's stream join to its answer without stream."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from tests.entrypoints.openai.serving import client_for

WORDS = ["What", " is", "the capital", " of", "France", "?", "12 + 30", "Hello", "!", " é", "json"]
STOPS = ["a", "e ", "is", "\n", ".", "Par", "th", "no such"]
VOCAB = range(300)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    args = {"max_model_len": 256, "cpu_threads": 1, "reasoning_start_str": "?", "reasoning_end_str": " ."}
    engine = AsyncLLM(EngineConfig.from_args(**args), in_process=True)  # type: ignore[arg-type]
    await engine.wait_ready()
    async with client_for(engine) as client:
        yield client
    await engine.shutdown()


def maybe(draw: random.Random, share: float, **fields: Any) -> dict[str, Any]:
    return fields if draw.random() < share else {}


def some_ids(draw: random.Random, count: int) -> list[int]:
    return draw.sample(VOCAB, count)


def common_fields(draw: random.Random) -> dict[str, Any]:
    """Return random fields common to completions and chats; a request has a seed, so its samples are reproducible."""
    fields: dict[str, Any] = {
        "seed": draw.randrange(1000),
        "temperature": draw.choice([0, 0, 0.3, 1, 1.7]),
        "max_tokens": draw.choice([1, 2, 7, 20]),
    }
    fields |= maybe(draw, 0.3, n=draw.choice([2, 3]))
    fields |= maybe(draw, 0.2, top_p=draw.choice([0.2, 0.9]))
    fields |= maybe(draw, 0.2, top_k=draw.choice([1, 5, -1]))
    fields |= maybe(draw, 0.2, min_p=draw.choice([0.01, 0.5]))
    fields |= maybe(draw, 0.2, presence_penalty=draw.choice([-1.5, 1]))
    fields |= maybe(draw, 0.2, frequency_penalty=draw.choice([-1, 1.5]))
    fields |= maybe(draw, 0.2, repetition_penalty=draw.choice([0.7, 1.4]))
    fields |= maybe(draw, 0.3, stop=draw.sample(STOPS, 2), include_stop_str_in_output=draw.random() < 0.5)
    fields |= maybe(draw, 0.2, stop_token_ids=some_ids(draw, 40))
    fields |= maybe(draw, 0.2, min_tokens=draw.choice([1, fields["max_tokens"]]))
    fields |= maybe(draw, 0.2, ignore_eos=True, skip_special_tokens=draw.random() < 0.5)
    fields |= maybe(draw, 0.2, logit_bias={str(i): draw.choice([-100, -2, 3]) for i in some_ids(draw, 3)})
    fields |= maybe(draw, 0.15, allowed_token_ids=some_ids(draw, 40))
    fields |= maybe(
        draw, 0.3, bad_words=draw.sample(["a", "is", "The", "the capital", "Paris", " é", "1"], 3)
    )
    fields |= maybe(draw, 0.3, thinking_token_budget=draw.choice([-1, 0, 2, 5]))
    sizes = {"max_pattern_size": draw.choice([1, 3]), "min_count": 2}
    fields |= maybe(draw, 0.3, repetition_detection=sizes)
    fields |= maybe(draw, 0.3, stream_interval=draw.choice([1, 3, 50]))
    return fields | maybe(draw, 0.3, return_token_ids=True)


def completion(draw: random.Random) -> tuple[str, dict[str, Any]]:
    texts = ["".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(draw.choice([1, 1, 3]))]
    prompt: Any = [some_ids(draw, 5) for _ in texts] if draw.random() < 0.3 else texts
    body = common_fields(draw) | {"prompt": prompt if len(texts) > 1 else prompt[0]}
    if draw.random() < 0.15:
        return "/v1/completions", body | {"logprob_token_ids": some_ids(draw, 3)}
    body |= maybe(draw, 0.4, logprobs=draw.choice([0, 1, 5]))
    return "/v1/completions", body | maybe(draw, 0.3, echo=True, max_tokens=draw.choice([0, 3]), min_tokens=0)


def chat(draw: random.Random) -> tuple[str, dict[str, Any]]:
    content = "".join(draw.choices(WORDS, k=draw.randint(1, 6)))
    body = common_fields(draw) | {"messages": [{"role": "user", "content": content}]}
    if draw.random() < 0.15:
        return "/v1/chat/completions", body | {"logprobs": True, "logprob_token_ids": some_ids(draw, 3)}
    return "/v1/chat/completions", body | maybe(draw, 0.4, logprobs=True, top_logprobs=draw.choice([0, 4]))


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """(choices, usage) without stream, or the error."""
    response = await client.post(path, json=body)
    answer = response.json()
    if response.status_code != 200:
        return response.status_code, answer["error"]["message"]
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_facts(choice, choice.get("message")) for choice in choices], _usage(answer)


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The same from the chunks of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=body | options)
    if response.status_code != 200:
        return response.status_code, response.json()["error"]["message"]
    lines = [line[len("data: ") :] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    if "error" in chunks[-1]:
        return chunks[-1]["error"]["code"], chunks[-1]["error"]["message"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _join(joined.setdefault(choice["index"], {"text": ""}), choice)
    return [_facts(joined[index], joined[index]) for index in sorted(joined)], _usage(chunks[-1])


def _join(mine: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    mine["text"] += choice.get("text") or delta.get("content") or ""
    for name, new in (choice.get("logprobs") or {}).items():
        known = mine.setdefault("logprobs", {}).setdefault(name, [])
        known += new or []
    for name in ("token_ids", "prompt_token_ids"):
        if choice.get(name) is not None:
            mine[name] = mine.get(name, []) + choice[name]
    if choice.get("finish_reason"):
        mine |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}


def _facts(choice: dict[str, Any], message: dict[str, Any] | None) -> dict[str, Any]:
    text = (message or {}).get("content") or choice.get("text") or ""
    logprobs = {name: value or [] for name, value in (choice.get("logprobs") or {}).items()}
    names = ("finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
    return {"text": text, "logprobs": logprobs} | {name: choice.get(name) for name in names}


def _usage(answer: dict[str, Any]) -> dict[str, int]:
    """Return the token counts of an answer without their details, since cached tokens depend on earlier requests."""
    return {name: value for name, value in answer["usage"].items() if name.endswith("_tokens")}


async def check(client: httpx.AsyncClient, count: int, seed: int) -> None:
    draw = random.Random(seed)
    reasons: set[str] = set()
    for _ in range(count):
        path, body = draw.choice([completion, chat])(draw)
        expected = await whole(client, path, body)
        assert await streamed(client, path, body) == expected, body
        if isinstance(expected[0], list):
            reasons |= {choice["finish_reason"] for choice in expected[0]}
    assert reasons >= {"stop", "length", "repetition"}


async def test_fifty_random_requests(client: httpx.AsyncClient) -> None:
    await check(client, 50, seed=1)


@pytest.mark.more
async def test_four_hundred_random_requests(client: httpx.AsyncClient) -> None:
    await check(client, 400, seed=2)
