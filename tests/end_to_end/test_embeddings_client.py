# SPDX-License-Identifier: Apache-2.0
"""The embedder in the box over HTTP, by stock clients: the bits that `LLM.embed` has."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from quire import LLM, TextOptions
from tests.end_to_end.server import Server

MODEL = "quire-demo-embed"
TEXTS = [
    "The capital of France is Paris.",
    "A young cow is called a calf.",
    "What is a baby cow?",
    "cat " * 60,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(MODEL, log=tmp_path_factory.mktemp("embedder") / "log").wait_ready()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    llm = LLM(MODEL)
    yield llm
    llm.shutdown()


def vectors(llm: LLM, options: TextOptions | None = None) -> NDArray[np.float32]:
    outputs = llm.embed(TEXTS, options=options or TextOptions(), use_tqdm=False)
    return np.array([one.outputs.embedding for one in outputs], np.float32)


def test_the_openai_client_gets_the_bits_of_the_library(server: Server, offline: LLM) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    expected = vectors(offline)
    packed = client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64 by itself
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in TEXTS]
    for found in ([one.embedding for one in packed.data], [one.embedding for one in plain.data], alone):
        assert np.array(found, np.float32).tobytes() == expected.tobytes()
    assert [one.index for one in packed.data] == [0, 1, 2, 3]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == plain.usage.total_tokens > 60
    with pytest.raises(openai.BadRequestError, match="dimensions is 3"):
        client.embeddings.create(model=MODEL, input="a", dimensions=3)


def test_coheres_shape_has_them_too(server: Server, offline: LLM) -> None:
    body = {
        "model": MODEL,
        "texts": TEXTS,
        "input_type": "search_document",
        "embedding_types": ["float", "binary"],
    }
    reply = httpx.post(f"{server.url}/v2/embed", json=body, timeout=60).json()
    assert (reply["response_type"], reply["texts"]) == ("embeddings_by_type", TEXTS)
    found = np.array(reply["embeddings"]["float"], np.float32)
    assert found.tobytes() == vectors(offline).tobytes(), "the model has no prompt for documents"
    packed = (np.array(reply["embeddings"]["binary"]) + 128).astype(np.uint8)
    bits = np.unpackbits(packed, axis=1)
    assert (bits == (found > 0)).all()


def test_a_search_over_http_finds_the_fact(server: Server) -> None:
    body = {"model": MODEL, "query": "What is a baby cow?", "documents": TEXTS[:2], "top_n": 1}
    reply = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
    assert reply["results"][0]["document"]["text"] == TEXTS[1]
