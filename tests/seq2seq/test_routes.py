# SPDX-License-Identifier: Apache-2.0
"""The completions route with a whole engine of a translator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from tests.seq2seq.test_prompts import ENGLISH, FRENCH, save_tokenizer
from tests.seq2seq.tiny import END, START, greedy, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("m2m100")
    model = save("m2m100", path)
    save_tokenizer(path)
    return path, model


@pytest.fixture
async def client(checkpoint: tuple[Path, Any]) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig.from_args(model=str(checkpoint[0]), dtype="float32", gpu_memory_utilization=0.02)
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    transport = httpx.ASGITransport(build_app(engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://quire/v1") as made:
        yield made
    await engine.shutdown()


async def test_completions_translate_and_search(
    client: httpx.AsyncClient, checkpoint: tuple[Path, Any]
) -> None:
    body = {
        "prompt": "w5 w6",
        "temperature": 0,
        "max_tokens": 5,
        "ignore_eos": True,
        "return_token_ids": True,
        "source_language": "fra_Latn",
        "target_language": "eng_Latn",
    }
    reply = (await client.post("/completions", json=body)).json()
    wanted = greedy(checkpoint[1], [FRENCH, 5, 6, END], 5, [START, ENGLISH])[0]
    assert reply["choices"][0]["token_ids"] == wanted
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9} | {
        name: value for name, value in reply["usage"].items() if name.endswith("details")
    }
    search = {"prompt": ["w5 w6", "w7"], "use_beam_search": True, "n": 2, "max_tokens": 5}
    reply = (await client.post("/completions", json=search)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/completions", {"prompt": "w5", "target_language": "xx_YY"}, "languages are eng_Latn, fra_Latn"),
        ("/completions", {"prompt": [5] * 41}, "maximum input length is 40 tokens"),
        ("/completions", {"prompt": "w5", "echo": True, "logprobs": 1}, "text that an encoder reads"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}, "chat template"),
    ],
)
async def test_wrong_requests_get_400_with_the_reason(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
