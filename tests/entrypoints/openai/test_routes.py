# SPDX-License-Identifier: Apache-2.0
"""The smaller routes, the metrics, and what importing the app costs."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest

from quire.config import ServerConfig
from quire.entrypoints.chat.formats.tools import TOOL_FORMATS
from quire.entrypoints.openai.app import build_app
from quire.errors import ConfigError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

HI = [{"role": "user", "content": "hi"}]


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    (card,) = body["data"]
    assert body["object"] == "list"
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "fake-model",
        "model",
        "quire",
        4096,
    )
    assert (await client.get("/v1/models/fake-model")).json() == card


async def test_several_served_names() -> None:
    async with client_for(FakeEngine(served_model_name=("org/a", "b"))) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["org/a", "b"]
        assert (await client.get("/v1/models/org/a")).json()["id"] == "org/a"
        answer = await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        assert answer.json()["model"] == "b"
        assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["model"] == "org/a"


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    text = "hi ä <|im_end|>"
    body = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 4096
    assert body["tokens"][-1] == 257
    assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json()["prompt"] == text


async def test_tokenize_chat_equals_the_model_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = (await client.post("/tokenize", json={"messages": HI, "tools": tools})).json()
    await client.post("/v1/chat/completions", json={"messages": HI, "tools": tools})
    assert engine.seen[0][0]["prompt_token_ids"] == body["tokens"]


async def test_no_messages_are_none(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"prompt": "x", "messages": None})).json()["count"] == 1


async def test_tokenize_refusals(client: httpx.AsyncClient) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["1"]}, "tokens.0"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json()["version"]


@pytest.mark.item(25)
async def test_metrics_do_not_grow_with_strange_requests(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "hi"})
    await client.get("/x")
    await client.request("FOO0", "/v1/completions")
    await client.get("/v1/models/m")
    await client.get("/metrics")
    before = (await client.get("/metrics")).text
    assert 'quire:http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0' in before
    assert 'quire:generation_tokens_total{engine="0",model_name="fake-model"} 9.0' in before
    for index in range(50):
        await client.get(f"/x{index}")
        await client.request(f"FOO{index}", "/v1/completions")
        await client.get(f"/v1/models/m{index}")
    await client.get("/v1/models/m")
    after = (await client.get("/metrics")).text
    assert len(after.splitlines()) - len(before.splitlines()) <= 2


async def answered_id(client: httpx.AsyncClient, *given: str) -> str:
    headers = [("x-request-id", one) for one in given]
    return (await client.get("/health", headers=headers)).headers["x-request-id"]


@pytest.mark.parametrize("given", ["same", "3f2c-9.a_b:c", "Root=1-67891233-abcdef", "x" * 128])
async def test_request_id_of_the_client_is_taken_over(client: httpx.AsyncClient, given: str) -> None:
    assert await answered_id(client, given) == given


@folded("given", [(), ("",), ("a b",), ("x" * 129,), ("a\tb",), ("a/b",), ("a", "b"), ("a,b",)])
async def test_request_id_that_is_not_sane_is_ours(client: httpx.AsyncClient, given: tuple[str, ...]) -> None:
    first, second = await answered_id(client, *given), await answered_id(client, *given)
    assert first != second
    assert re.fullmatch("[0-9a-f]{24}", first)


def test_the_formats_of_answers_are_chosen_by_the_template(engine: FakeEngine) -> None:
    formats = build_app(engine, ServerConfig()).state.server.form.answer_format.formats  # type: ignore[arg-type]
    assert formats.tools is TOOL_FORMATS.resolve("hermes")
    assert formats.reasoning is None


async def test_unknown_parser_is_reported_at_the_start(engine: FakeEngine) -> None:
    state = build_app(engine, ServerConfig(tool_call_parser="hermse")).state.server  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--tool-call-parser must be one of auto, none, .*hermes"):
        await state.prepare()


@pytest.mark.item(60)
def test_app_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "import quire.entrypoints.openai.app, quire.entrypoints.openai.api_server\n"
        "import quire.entrypoints.openai.lifecycle\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
