# SPDX-License-Identifier: Apache-2.0
"""Prompts that are embeddings, over HTTP: what is taken, what is refused in words, and the cache that they fill."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.async_llm import AsyncLLM
from tests.entrypoints.openai.serving import client_for

PATH = "/v1/completions"
PLAIN = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def base64_npy(values: Any) -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(params=[True])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    args = {
        "distributed_executor_backend": "null",
        "num_gpu_blocks_override": 200,
        "enable_prompt_embeds": request.param,
    }
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    async with client_for(engine, admin_api_key="admin") as client:  # type: ignore[arg-type]
        client.headers.update({"authorization": "Bearer admin"})
        await engine.wait_ready()
        client.hidden_size = engine.config.arch.hidden_size  # type: ignore[attr-defined]
        yield client
    await engine.shutdown()


def values_for(client: Any, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((5, client.hidden_size)).astype(np.float32)


async def texts(client: httpx.AsyncClient, **body: Any) -> list[str]:
    response = await client.post(PATH, json={**PLAIN, **body})
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


async def test_embeddings_are_prompts_before_the_texts(served: httpx.AsyncClient) -> None:
    first, second = values_for(served), values_for(served, 1)
    files = [base64_npy(first), base64.b64encode(save({"v": second})).decode()]
    both = await texts(served, prompt="hello", prompt_embeds=files)
    alone = [await texts(served, prompt=[], prompt_embeds=file) for file in files]
    assert both == [*alone[0], *alone[1], *await texts(served, prompt="hello")]
    assert await texts(served, prompt="", prompt_embeds=files[0]) == alone[0]
    assert len(set(both)) == 3
    response = await served.post(PATH, json={**PLAIN, "prompt": "", "prompt_embeds": files[0], "n": 2})
    assert response.json()["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"prompt_embeds": 3}, "must be base64"),
        ({"prompt_embeds": [3]}, "must be base64"),
        ({"prompt_embeds": "???"}, "not valid base64"),
        ({"prompt_embeds": "aGVsbG8="}, "no safetensors or .npy file"),
        ({"prompt_embeds": base64_npy(np.ones((2, 3), np.float32))}, "the model's hidden size is"),
        ({"echo": True}, "echo cannot be combined with prompt_embeds"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens cannot be combined with prompt_embeds"),
        ({"prompt_logprobs": 1}, "prompt_logprobs are of tokens"),
    ],
)
async def test_impossible_embeds_are_a_400_with_a_message(
    served: httpx.AsyncClient, more: dict[str, Any], problem: str
) -> None:
    body = {**PLAIN, "prompt": "", "prompt_embeds": base64_npy(values_for(served)), **more}
    response = await served.post(PATH, json=body)
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


@pytest.mark.parametrize("served", [False], indirect=True)
async def test_without_the_flag_the_400_names_it(served: httpx.AsyncClient) -> None:
    response = await served.post(
        PATH, json={**PLAIN, "prompt": "", "prompt_embeds": base64_npy(values_for(served))}
    )
    assert response.status_code == 400
    assert "--enable-prompt-embeds" in response.json()["error"]["message"]


async def test_encoder_cache_is_reset_over_http(served: httpx.AsyncClient) -> None:
    await texts(served, prompt="", prompt_embeds=base64_npy(values_for(served)))
    assert (await served.post("/reset_encoder_cache")).json() == {"reset": True}
    assert (await served.post("/reset_encoder_cache?hard=1")).status_code == 400
