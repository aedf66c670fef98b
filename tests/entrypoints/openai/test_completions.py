# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: shapes, and that a stream joins to the whole answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, stream
from tests.fixtures.folded import folded

PATH = "/v1/completions"


def join(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices by index, put together from chunks."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = joined.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert mine["finish_reason"] is None, "a chunk after the finishing one"
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                mine["logprobs"] = mine["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    mine["logprobs"][name] += values
    return joined


async def test_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    response = await client.post(PATH, json={"model": "fake-model", "prompt": "Say"})
    body = response.json()
    assert response.status_code == 200
    assert body["id"] == "cmpl-" + response.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("text_completion", "fake-model")
    assert body["system_fingerprint"].startswith("quire-")
    assert body["choices"] == [
        {"index": 0, "text": "Reply 0!", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
         "prompt_logprobs": None}
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_draft_counts_are_reported_if_any(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.drafts = (7, 5)
    asked = {"prompt": "Say"} if path == PATH else {"messages": [{"role": "user", "content": "Say"}]}
    usage = (await client.post(path, json=asked)).json()["usage"]
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2,
    }  # fmt: skip


async def test_max_tokens_is_16_unless_given(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = lambda prompt, index: "x" * 100
    for given, expected in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)):
        choice = (await client.post(PATH, json={"prompt": "p", **given})).json()["choices"][0]
        assert (len(choice["text"]), choice["finish_reason"]) == (expected, "length")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
async def test_forms_of_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, texts: list[str]
) -> None:
    engine.reply = lambda prompt, index: prompt.upper() + str(index)
    body = (await client.post(PATH, json={"prompt": prompt, "n": 2})).json()
    expected = [f"{text.upper()}{index}" for text in texts for index in range(2)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


@folded("interval", [1, 3, 100])
@folded(
    "options",
    [
        {},
        {"n": 3},
        {"logprobs": 2, "max_tokens": 4},
        {"echo": True, "logprobs": 0},
        {"echo": True, "prompt": [[104, 105], [106]]},
        {"prompt": ["a", "b", "c"], "n": 2, "logprobs": 1},
        {"stop": ["eply"]},
    ],
)
async def test_stream_joins_to_whole(interval: int, options: dict[str, Any]) -> None:
    engine = FakeEngine(stream_interval=interval)
    engine.reply = lambda prompt, index: f"{prompt} Reply {index} ä€🙂!"
    async with client_for(engine) as client:
        body = {"prompt": "hi", "max_tokens": 50, **options}
        whole = (await client.post(PATH, json=body)).json()
        chunks = await stream(client, PATH, **body, stream_options={"include_usage": True})
    joined = join(chunks)
    for choice in whole["choices"]:
        for name in ("text", "finish_reason", "logprobs"):
            assert joined[choice["index"]][name] == choice[name]
    assert len(joined) == len(whole["choices"])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_prompts_are_streamed_interleaved(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, PATH, prompt=["a", "b"])
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert set(order[:4]) == {0, 1}


async def test_usage_in_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, PATH, prompt="hi", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9


async def test_forced_usage(engine: FakeEngine) -> None:
    async with client_for(engine, enable_force_include_usage=True) as client:
        assert (await stream(client, PATH, prompt="hi"))[-1]["usage"]["completion_tokens"] == 9


async def test_logprobs(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 3, "echo": True}
    choice = (await client.post(PATH, json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["prompt_logprobs"] is None
    assert logprobs["tokens"] == ["h", "i", "R", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2] == {"S": -0.5, "R": -1.0, "T": -9999.0}


async def test_tokens_are_named_by_their_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 3, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = (await client.post(PATH, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:104", "token_id:105", "token_id:82", "token_id:101"]
    assert logprobs["top_logprobs"][2] == {"token_id:83": -0.5, "token_id:82": -1.0, "token_id:84": -9999.0}
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    chunks = await stream(client, PATH, **body | {"echo": False})
    streamed = [
        token for one in chunks if one["choices"] for token in one["choices"][0]["logprobs"]["tokens"]
    ]
    assert streamed == logprobs["tokens"][2:]


async def test_prompt_logprobs_and_token_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    choice = (await client.post(PATH, json=body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [104, 105]
    assert choice["token_ids"] == list(b"Re")
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["105"] == {"logprob": -1.0, "rank": 2, "decoded_token": "i"}


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.input_processor.default_sampling_params = {"temperature": 0.5, "top_k": 7.0}
    body = {"prompt": "hello", "top_k": 3, "logit_bias": {"5": -1}, "truncate_prompt_tokens": 2, "cache_salt": "s",
            "seed": 4, "stop": "x", "min_p": 0.1}  # fmt: skip
    assert (await client.post(PATH, json=body)).status_code == 200
    prompt, params = engine.seen[0]
    assert prompt == {"prompt_token_ids": list(b"lo"), "cache_salt": "s"}
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.5, 3, 4, ("x",))
    assert params.logit_bias == {5: -1.0}


async def test_without_tokenizer() -> None:
    engine = FakeEngine(skip_tokenizer_init=True)
    async with client_for(engine) as client:
        body = (await client.post(PATH, json={"prompt": [1, 2], "return_token_ids": True})).json()
        assert body["choices"][0]["token_ids"]
        assert body["choices"][0]["text"] == ""
        refused = await client.post(PATH, json={"prompt": "text"})
        assert refused.status_code == 400
