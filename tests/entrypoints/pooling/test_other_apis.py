# SPDX-License-Identifier: Apache-2.0
"""Embeddings as Cohere's and Ollama's clients ask for them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.pooling.conftest import Serve
from tests.entrypoints.pooling.test_embeddings import TEXTS, vectors
from tests.fixtures.folded import folded
from tests.fixtures.pooling import CONTEXT, EMBEDDER

LONG = "abcdefghij" * 9


async def cohere(client: Any, **body: Any) -> Any:
    reply = await client.post("/v2/embed", json={"model": "pooler", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_cohere_gets_every_type_of_the_same_vectors(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        known = await vectors(client, input=TEXTS)
        reply = await cohere(client, texts=TEXTS, embedding_types=["float", "base64", "binary", "ubinary"])
        found = reply["embeddings"]
        assert found["float"] == known
        assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in found["base64"]] == known
        bits = [np.unpackbits(np.array(one, np.uint8))[:8].tolist() for one in found["ubinary"]]
        assert bits == [[int(number > 0) for number in vector] for vector in known]
        assert [[byte + 128 for byte in one] for one in found["binary"]] == found["ubinary"]
        assert (reply["texts"], reply["response_type"]) == (TEXTS, "embeddings_by_type")
        assert reply["meta"]["billed_units"]["input_tokens"] == 26
        parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        assert (await cohere(client, inputs=parts))["embeddings"] == {"float": known}


async def test_cohere_names_the_side_of_a_search_and_cuts(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:

        async def one(text: str, **body: Any) -> Any:
            return (await cohere(client, texts=[text], **body))["embeddings"]["float"]

        assert await one("x", input_type="search_query") == await vectors(
            client, input="x", prompt_name="query"
        )
        assert await one("x", input_type="search_document") == await vectors(
            client, input="x", prompt_name="passage"
        )
        assert await one("x", input_type="clustering") == await vectors(client, input="x")
        assert await one(LONG) == await vectors(client, input=LONG[: CONTEXT - 2])
        assert await one(LONG, truncate="START", max_tokens=5) == await vectors(client, input=LONG[-3:])


@folded("dimension", [None, 2, 4, 8])
@folded("input_type", [None, "search_query", "search_document", "classification", "clustering"])
async def test_coheres_fields_go_together(
    serve: Serve, dimension: int | None, input_type: str | None
) -> None:
    names = {"search_query": "query", "search_document": "passage"}
    asked: dict[str, Any] = {"output_dimension": dimension, "input_type": input_type, "truncate": "NONE"}
    async with serve(EMBEDDER) as client:
        named = {"prompt_name": name} if (name := names.get(input_type or "")) else {}
        known = await vectors(client, input=TEXTS, dimensions=dimension, **named)
        inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        kinds = ["ubinary", "float"]
        for given in ({"texts": TEXTS}, {"inputs": inputs}):
            reply = await cohere(client, **given, **asked, embedding_types=kinds)
            assert reply["embeddings"]["float"] == known
            signs = [np.packbits([number > 0 for number in vector]).tolist() for vector in known]
            assert (reply["embeddings"]["ubinary"], reply["embeddings"].keys()) == (signs, {*kinds})


async def test_cohere_truncates_the_named_side_to_the_named_number(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        for truncate, most, kept in (
            ("END", None, LONG[: CONTEXT - 2]),
            ("START", None, LONG[2 - CONTEXT :]),
            ("END", 7, LONG[:5]),
            ("START", 7, LONG[-5:]),
            ("END", 10**6, LONG[: CONTEXT - 2]),
            ("END", None, "short"),
        ):
            text = "short" if kept == "short" else LONG
            found = await cohere(client, texts=[text], truncate=truncate, max_tokens=most)
            assert found["embeddings"]["float"] == await vectors(client, input=kept)


@folded(
    "body",
    [
        {},
        {"texts": ["a"], "truncate": "MIDDLE"},
        {"texts": ["a"], "input_type": "essay"},
        {"texts": ["a"], "embedding_types": []},
        {"texts": ["a"], "max_tokens": 0},
        {"inputs": [{"content": []}]},
        {"inputs": [{"content": [{"type": "text", "text": ""}]}]},
        {"inputs": [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"inputs": ["a"]},
        {"texts": []},
        {"texts": [""]},
        {"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"images": ["data:image/png;base64,AA=="]},
        {"texts": ["a"], "embedding_types": ["int8"]},
        {"texts": ["a"], "output_dimension": 3},
        {"texts": ["a"], "output_dimension": 0},
        {"texts": [LONG], "truncate": "NONE"},
        {"texts": ["a"] * 3000},
    ],
)
async def test_cohere_errors_name_the_mistake(serve: Serve, body: dict[str, Any]) -> None:
    async with serve(EMBEDDER) as client:
        reply = await client.post("/v2/embed", json=body)
        assert (reply.status_code, reply.json().keys()) == (400, {"message"})


async def test_ollama_gets_the_same_vectors(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        known = await vectors(client, input=TEXTS)
        body: dict[str, Any] = {"model": "pooler:latest", "input": TEXTS, "keep_alive": "5m"}
        reply = (await client.post("/api/embed", json=body)).json()
        assert (reply["embeddings"], reply["model"], reply["prompt_eval_count"]) == (
            known,
            "pooler:latest",
            26,
        )
        assert reply["ignored"] == ["keep_alive"]
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert reply["timings"]["prefill_s"] > 0
        one = await client.post("/api/embeddings", json={"model": "pooler", "prompt": TEXTS[0]})
        assert one.json()["embedding"] == known[0]
        assert one.json().keys() == {"embedding", "usage", "timings"}
        cut = await client.post("/api/embed", json={"model": "pooler", "input": LONG})
        assert cut.json()["embeddings"] == await vectors(client, input=LONG[: CONTEXT - 2])
        for path, nothing in (("/api/embed", {"input": ""}), ("/api/embeddings", {"prompt": ""})):
            loaded = (await client.post(path, json={"model": "pooler", **nothing})).json()
            assert loaded.get("embeddings", loaded.get("embedding")) == []
        shown = (await client.post("/api/show", json={"model": "pooler"})).json()
        assert shown["capabilities"] == ["embedding"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": LONG, "truncate": False},
        {"input": ["a", ""]},
        {"input": [1]},
        {"input": {}},
        {"input": "a", "dimensions": 3},
    ],
)
async def test_ollama_errors_name_the_mistake(serve: Serve, body: dict[str, Any]) -> None:
    async with serve(EMBEDDER) as client:
        reply = await client.post("/api/embed", json={"model": "pooler", **body})
        assert (reply.status_code, reply.json().keys()) == (400, {"error"}), reply.text


async def test_without_a_text_a_request_is_checked_all_the_same(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        body = {"model": "pooler", "input": ""}
        assert (await client.post("/api/embed", json=body)).json()["embeddings"] == []
        for name, value in (("dimensions", 0), ("priority", -1)):
            refused = await client.post("/api/embed", json={**body, name: value})
            assert (refused.status_code, name in refused.json()["error"]) == (400, True)


async def test_llama_server_embeds_texts_and_tokens(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        known = await vectors(client, input=TEXTS)
        reply = await client.post("/embedding", json={"content": TEXTS, "embd_normalize": 2})
        assert reply.json() == [{"index": i, "embedding": [vector]} for i, vector in enumerate(known)]
        raw = await vectors(client, input=TEXTS[0], use_activation=False)
        reply = await client.post("/embedding", json={"content": TEXTS[0], "embd_normalize": -1})
        assert reply.json()[0]["embedding"] == raw
        reply = await client.post("/embedding", json={"content": [5, 6, 7]})
        assert reply.json()[0]["embedding"] == await vectors(client, input=[5, 6, 7])
        for body, part in (
            ({"content": TEXTS, "embd_normalize": 0}, "embd_normalize must be 2"),
            ({"content": ""}, "content must not be empty"),
            ({"content": 3}, "content must be text"),
            ({}, "content is required"),
            ({"content": LONG}, "content"),
        ):
            refused = await client.post("/embedding", json=body)
            assert (refused.status_code, part in refused.text) == (400, True), refused.text
