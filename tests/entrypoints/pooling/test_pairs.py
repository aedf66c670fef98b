# SPDX-License-Identifier: Apache-2.0
"""POST /score and /rerank under all of their names."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.pooling import PoolingSpec
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.folded import folded
from tests.fixtures.pooling import ANSWERING, CROSS_ENCODER, EMBEDDER, PAIR_TEMPLATE, TOKEN_EMBEDDER

DOCUMENTS = ["abc", "d", "hello world", "x y z"]


async def scores(client: Any, **body: Any) -> list[float]:
    reply = await client.post("/score", json=body)
    assert reply.status_code == 200, reply.text
    return [one["score"] for one in reply.json()["data"]]


@pytest.mark.parametrize("spec", [CROSS_ENCODER, EMBEDDER], ids=["cross-encoder", "embedder"])
async def test_a_score_is_that_of_its_pair(serve: Serve, spec: PoolingSpec) -> None:
    async with serve(spec) as client:
        together = await scores(client, text_1="abc", text_2=DOCUMENTS)
        for one, other in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
            assert await scores(client, **{one: "abc", other: DOCUMENTS}) == together
        assert [(await scores(client, text_1="abc", text_2=text))[0] for text in DOCUMENTS] == together
        many = await scores(client, text_1=DOCUMENTS[::-1], text_2=DOCUMENTS)
        pairs = zip(DOCUMENTS[::-1], DOCUMENTS, strict=True)
        assert many == [(await scores(client, text_1=one, text_2=other))[0] for one, other in pairs]
        cut = await scores(
            client, text_1="abc", text_2=["hello world"], max_tokens_per_doc=5, max_tokens_per_query=4
        )
        assert cut == (await scores(client, text_1="abc", text_2="hello")) or spec is EMBEDDER


@pytest.mark.parametrize("spec", [CROSS_ENCODER, EMBEDDER], ids=["cross-encoder", "embedder"])
async def test_a_ranking_has_the_best_first(serve: Serve, spec: PoolingSpec) -> None:
    async with serve(spec) as client:
        known = await scores(client, text_1="abc", text_2=DOCUMENTS)
        documents: list[Any] = [*DOCUMENTS[:3], {"text": DOCUMENTS[3]}]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            reply = (await client.post(path, json={"query": "abc", "documents": documents})).json()
            results = reply["results"]
            assert [one["relevance_score"] for one in results] == sorted(known, reverse=True)
            assert [known[one["index"]] for one in results] == sorted(known, reverse=True)
            if path == "/v2/rerank":
                assert "document" not in results[0]
            else:
                assert [one["document"]["text"] for one in results] == [
                    DOCUMENTS[one["index"]] for one in results
                ]
            body = {
                "query": "abc",
                "documents": documents,
                "top_n": 2,
                "return_documents": path == "/v2/rerank",
            }
            best = (await client.post(path, json=body)).json()["results"]
            assert [one["index"] for one in best] == [one["index"] for one in results[:2]]
            assert ("document" in best[0]) == (path == "/v2/rerank")
            assert reply["usage"]["prompt_tokens"] > 0
            assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert reply["timings"]["prefill_s"] > 0
            assert "created" not in reply


@folded(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "data_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/score", {"queries": "a", "documents": ["b", ""]}, "documents"),
        ("/score", {"queries": "a", "documents": [1]}, "documents"),
        ("/score", {"data_1": "a", "data_2": "b" * 50}, "data_2"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"] * 3000}, "documents"),
    ],
)
async def test_bad_pairs_are_reported_with_their_field(
    serve: Serve, path: str, body: dict[str, Any], param: str
) -> None:
    async with serve(CROSS_ENCODER) as client:
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_late_interaction_scores_pairs_too(serve: Serve) -> None:
    async with serve(TOKEN_EMBEDDER) as client:
        reply = await client.post("/v1/embeddings", json={"input": "a"})
        assert reply.status_code == 400
        assert "/rerank" in reply.text


async def test_pairs_of_a_language_model_are_written_by_its_template(serve: Serve) -> None:
    async with serve(ANSWERING, chat_template=PAIR_TEMPLATE) as client:
        body = {"query": "abc", "documents": ["xy", "x" * 30]}
        reply = await client.post("/rerank", json=body)
        assert reply.status_code == 400
        assert "context" in reply.json()["error"]["message"]
        for how, num_tokens in (({"max_tokens_per_doc": 5}, 5), ({"truncate_prompt_tokens": 20}, 9)):
            reply = await client.post("/rerank", json=body | how)
            assert reply.status_code == 200, reply.text
            own = 2 * len("find:abc::z")
            assert reply.json()["usage"]["prompt_tokens"] == own + len("xy") + num_tokens
        reply = await client.post("/score", json={"text_1": "abc", "text_2": "xy", "prompt_name": ""})
        assert reply.json()["usage"]["prompt_tokens"] == len("abc:xy:z")
        reply = await client.post("/score", json={"text_1": "abc", "text_2": "xy", "prompt_name": "code"})
        assert reply.status_code == 400
        assert "it has web" in reply.json()["error"]["message"]


async def test_language_model_without_template_names_it(serve: Serve) -> None:
    async with serve(ANSWERING) as client:
        reply = await client.post("/score", json={"text_1": "abc", "text_2": "xy"})
        assert reply.status_code == 400
        assert "chat template" in reply.json()["error"]["message"]
