# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from quire.config.pooling import HeadLayer, PoolingSpec
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling.server.protocol import MAX_INPUTS
from quire.pooling.server.run import words_of
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.folded import folded
from tests.fixtures.pooling import CLASSIFIER, CLS, CONTEXT, EMBEDDER, REWARDS, SEP

TEXTS = ["abc", "d", "hello world", "abc"]


async def vectors(client: Any, **body: Any) -> list[Any]:
    reply = await client.post("/v1/embeddings", json=body)
    assert reply.status_code == 200, reply.text
    return [one["embedding"] for one in reply.json()["data"]]


async def test_every_form_of_input_and_both_of_numbers(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        reply = (await client.post("/v1/embeddings", json={"model": "pooler", "input": TEXTS})).json()
        assert [(one["object"], one["index"]) for one in reply["data"]] == [
            ("embedding", i) for i in range(4)
        ]
        assert (reply["object"], reply["model"], reply["id"][:5]) == ("list", "pooler", "embd-")
        found = [one["embedding"] for one in reply["data"]]
        assert found[0] == found[3] != found[1]
        for text, vector in zip(TEXTS, found, strict=True):
            assert await vectors(client, input=text) == [vector]
        ids = (await client.post("/tokenize", json={"prompt": "abc"})).json()["tokens"]
        assert await vectors(client, input=ids) == await vectors(client, input=[ids]) == [found[0]]
        (packed,) = await vectors(client, input="abc", encoding_format="base64")
        assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == found[0]
        details = {"cached_tokens": 0}
        assert reply["usage"] == {
            "prompt_tokens": 3 + 1 + 11 + 3 + 8, "total_tokens": 26, "prompt_tokens_details": details
        }  # fmt: skip
        assert reply["timings"].keys() == {"queue_s", "prefill_s", "decode_s", "tokens_per_s"}
        assert reply["timings"]["prefill_s"] > 0


async def test_media_for_a_model_of_texts_are_refused(serve: Serve) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    async with serve(EMBEDDER) as client:
        for path in ("/v1/embeddings", "/pooling"):
            reply = await client.post(path, json={"messages": [{"role": "user", "content": [part]}]})
            assert reply.status_code == 400
            assert "this model takes text only" in reply.text


async def test_input_limit_is_reported_and_reachable(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        assert len(await vectors(client, input=["a"] * MAX_INPUTS, encoding_format="base64")) == MAX_INPUTS
        reply = await client.post("/v1/embeddings", json={"input": ["a"] * 100_000})
        assert reply.status_code == 400
        assert "input has 100000 inputs; 1 to 2048 are allowed" in reply.text


@folded(
    ("body", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "1 to 2048 are allowed"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": [[]]}, "input", "must not be empty"),
        ({"input": {"text": "a"}}, "input", "input must be text, a list of texts"),
        ({"input": "a" * 50}, "input", "maximum context length is 40 tokens"),
        ({"input": [99]}, "input", "token ids are integers in [0, 29]"),
        ({"input": [-1]}, "input", "token ids are integers"),
        ({"input": "a", "dimensions": 3}, "dimensions", "can have 2, 4, 8"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be 'float' or 'base64'"),
        ({"input": "a", "prompt_name": "essay"}, "prompt_name", "it has query, passage"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "no room for text"),
        ({"input": "a", "normalize": True}, "normalize", "is called use_activation"),
        ({"input": [1] * 50, "average_windows": True}, "average_windows", "needs texts"),
        ({"input": "a", "model": "gpt"}, "model", "does not exist"),
    ],
)
async def test_bad_input_is_reported_with_its_field(
    serve: Serve, body: dict[str, Any], param: str, message: str
) -> None:
    async with serve(EMBEDDER) as client:
        reply = await client.post("/v1/embeddings", json=body)
        assert reply.status_code == (404 if param == "model" else 400)
        assert reply.json()["error"]["param"] == param
        assert message in reply.json()["error"]["message"]


async def test_long_texts_are_truncated_or_averaged_on_request(serve: Serve) -> None:
    long = "abcdefghij" * 9
    async with serve(EMBEDDER) as client:
        (cut,) = await vectors(client, input=long, truncate_prompt_tokens=-1)
        assert [cut] == await vectors(client, input=long[: CONTEXT - 2])
        left = await vectors(client, input=long, truncate_prompt_tokens=5, truncation_side="left")
        assert left == await vectors(client, input=long[-3:])
        pieces = [long[:38], long[38:76], long[76:]]
        parts = np.array(await vectors(client, input=pieces))
        mean = np.average(parts, axis=0, weights=[40, 40, 16])
        (whole, short) = await vectors(client, input=[long, "abc"], average_windows=True)
        assert whole == pytest.approx(mean / np.linalg.norm(mean), rel=1e-6)
        assert [short] == await vectors(client, input="abc")
        (plain,) = await vectors(client, input=long, average_windows=True, use_activation=False)
        assert plain == pytest.approx(mean, rel=1e-6)
        reply = await client.post("/v1/embeddings", json={"input": "a" * 38 * 2049, "average_windows": True})
        assert "makes 2049 prompts; at most 2048" in reply.text


async def test_prompts_of_the_model_are_put_before_texts(serve: Serve) -> None:
    async with serve(dataclasses.replace(EMBEDDER, default_prompt="passage")) as client:
        assert await vectors(client, input="x") == await vectors(client, input="p: x", prompt_name="")
        assert await vectors(client, input="x", prompt_name="query") == await vectors(
            client, input="q: x", prompt_name=""
        )


async def test_pooling_output_is_selected_by_its_task(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        reply = (await client.post("/pooling", json={"input": "abc"})).json()
        assert [one["data"] for one in reply["data"]] == await vectors(client, input="abc")
        assert reply["data"][0]["object"] == "pooling"
        for body, param in (
            ({"task": "classify"}, "task"),
            ({"task": "token_embed", "encoding_format": "base64"}, "encoding_format"),
            ({"step_tag_id": 3}, "step_tag_id"),
        ):
            reply = await client.post("/pooling", json={"input": "abc", **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert (
            await client.post("/pooling", json={"input": "abc", "task": "token_embed"})
        ).status_code == 200
    async with serve(REWARDS) as client:
        body = {"input": "abc", "step_tag_id": 3, "returned_token_ids": [1]}
        assert (await client.post("/pooling", json=body)).status_code == 200


async def test_classes_have_their_labels(serve: Serve) -> None:
    async with serve(CLASSIFIER) as client:
        (one,) = (await client.post("/classify", json={"input": "abc"})).json()["data"]
        assert one["label"] == CLASSIFIER.labels[int(np.argmax(one["probs"]))]
        assert one["num_classes"] == len(one["probs"]) == 3


async def test_wrong_endpoint_lists_the_supported_ones(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/chat", "/classify"):
            reply = await client.post(path, json={})
            assert reply.status_code == 400
            assert (
                f"{path} is not supported by this model, which is served for embed, token_embed; use"
                in reply.text
            )
            assert "/v1/embeddings, /pooling, /v1/score" in reply.text
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v1/embeddings" in paths
        assert not {"/v1/completions", "/classify"} & paths.keys()
    async with serve(CLASSIFIER) as client:
        reply = await client.post("/v1/embeddings", json={"input": "a"})
        assert "use /pooling, /classify" in reply.text
        assert (await client.post("/rerank", json={})).status_code == 400


async def test_disconnected_client_ends_its_requests(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        engine = client.engine  # type: ignore[attr-defined]
        task = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["ab"] * 2000}))
        while not engine.labels():  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.num_unfinished_requests() == 0
        reply = await client.post("/v1/embeddings", json={"input": ["ab"] * 2000, "timeout": 1e-6})
        assert reply.status_code == 504
        assert len(await vectors(client, input="abc")) == 1


async def test_unknown_fields_are_named(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        reply = await client.post("/v1/embeddings", json={"input": "a", "mood": 1})
        assert (reply.json()["ignored"], reply.headers["x-quire-ignored-fields"]) == (["mood"], "mood")


WORDS = dataclasses.replace(EMBEDDER, own_heads=(("token_classify", (HeadLayer("sparse/linear", 8, 1),)),))
WORDS = dataclasses.replace(WORDS, tasks=(*EMBEDDER.tasks, "token_classify"))


def test_words_of_a_text_have_weights_and_tokens_around_it_none() -> None:
    weights = np.array([[0.5], [0.25], [0.0], [0.75], [0.125]], np.float32)
    output = PoolingRequestOutput("a", PoolingOutput(weights), [CLS, 7, 9, 7, SEP])
    (found,) = words_of([output], frozenset({CLS, SEP}))
    assert json.loads(bytes(found)) == {"7": 0.75}
    assert output.lexical_weights() == {CLS: 0.5, 7: 0.75, SEP: 0.125}


async def test_words_have_weights_where_the_model_weighs_them(serve: Serve) -> None:
    async with serve(WORDS) as client:
        for body, message in (
            ({"task": "embed"}, "needs the task token_classify, but the task is embed"),
            ({"encoding_format": "base64"}, "cannot be encoded as base64"),
        ):
            reply = await client.post("/pooling", json={"input": "a", "lexical_weights": True, **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lexical_weights")
            assert message in reply.json()["error"]["message"]
    async with serve(PoolingSpec(("embed",), "max", 30, weighs_vocabulary=True)) as client:
        (numbers,) = await vectors(client, input="abc")
        reply = await client.post("/pooling", json={"input": "abc", "lexical_weights": True})
        expected = {str(token): number for token, number in enumerate(numbers) if number > 0}
        assert reply.json()["data"][0]["data"] == expected
        assert expected
    async with serve(EMBEDDER) as client:
        reply = await client.post("/pooling", json={"input": "a", "lexical_weights": True})
        assert reply.status_code == 400
        assert "needs a model with lexical weights" in reply.json()["error"]["message"]


async def test_windows_are_averaged_by_every_route_that_embeds(serve: Serve) -> None:
    long = "abcdefghij" * 9
    async with serve(EMBEDDER) as client:
        (known,) = await vectors(client, input=long, average_windows=True)
        asked = {"average_windows": True}
        for path, body, found in (
            ("/pooling", {"input": long}, lambda reply: reply["data"][0]["data"]),
            ("/v2/embed", {"texts": [long]}, lambda reply: reply["embeddings"]["float"][0]),
            ("/v2/embed", {"texts": [long], "truncate": "NONE"}, lambda one: one["embeddings"]["float"][0]),
            ("/api/embed", {"model": "pooler", "input": long}, lambda reply: reply["embeddings"][0]),
        ):
            reply = await client.post(path, json=body | asked)
            assert found(reply.json()) == known, (path, reply.text)
            assert reply.json()["usage"]["prompt_tokens"] == 40 + 40 + 16
        for path, body in (
            ("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}),
            ("/pooling", {"input": long, "truncate_prompt_tokens": 5}),
            ("/pooling", {"input": long, "task": "token_embed"}),
            ("/v2/embed", {"texts": [long], "truncate": "END"}),
            ("/v2/embed", {"texts": [long], "max_tokens": 9}),
            ("/api/embed", {"model": "pooler", "input": long, "truncate": True}),
        ):
            reply = await client.post(path, json=body | asked)
            assert reply.status_code == 400, (path, reply.text)
            assert "average_windows" in reply.text
