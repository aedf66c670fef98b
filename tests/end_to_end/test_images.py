# SPDX-License-Identifier: Apache-2.0
"""Images through every API of a real server, by stock clients: the same answer, also after the core has died."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
import tokenizers
from PIL import Image

from quire import LLM, SamplingParams
from tests.end_to_end.server import HEALTHY_WITHIN_S, Server, wait_until
from tests.fixtures.seeing_models import IMAGE_TOKEN, make_seeing

NUM_TOKENS = 8
FIRST, SECOND, THIRD = SEEDS = (12, 11, 9)  # Pictures with different answers, all of plain words.
NAME = "seeing"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> {% elif part.type == 'text' %}"
    "{{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "t5 t6"


def png(seed: int, width: int = 33, height: int = 40) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def url_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def messages(*images: bytes, text: str = TEXT) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    make_seeing("llava", path)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor", **sizes})
    )
    vocab = {f"t{index}": index for index in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<image>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", NAME, "--device", "cpu")
    server = Server("--model", str(checkpoint), *args, log=tmp_path_factory.mktemp("log") / "log")
    try:
        yield server.wait_ready()
        server.check_rest()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> dict[int, str]:
    """Return the text of `LLM.chat` about each picture, by its seed."""
    llm = LLM(str(checkpoint), dtype="float32", max_model_len=256, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.chat([messages(png(seed)) for seed in SEEDS], params, use_tqdm=False)
    llm.shutdown()
    found = {seed: output.outputs[0].text for seed, output in zip(SEEDS, outputs, strict=True)}
    assert len(set(found.values())) == len(found), "pictures of different answers"
    return found


def chat(server: Server, *images: bytes, **fields: Any) -> httpx.Response:
    body = {
        "model": NAME,
        "messages": messages(*images),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def test_stock_clients_get_the_answer_of_offline_chat(server: Server, answers: dict[int, str]) -> None:
    image, wanted = png(FIRST), answers[FIRST]
    more: dict[str, Any] = {"ignore_eos": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model=NAME, messages=messages(image), max_tokens=NUM_TOKENS, temperature=0, extra_body=more
        )
    assert reply.choices[0].message.content == wanted
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details.image_tokens == 16  # type: ignore[union-attr]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    import anthropic  # which takes seconds, so processes that do not run this test do without

    with anthropic.Anthropic(base_url=server.url, api_key="none") as claude:
        message = claude.messages.create(
            model=NAME,
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            extra_body={"temperature": 0.0},
        )
    assert message.content[0].text  # type: ignore[union-attr]
    assert wanted.startswith(message.content[0].text)  # type: ignore[union-attr]  # up to the first end token
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    lama = ollama.Client(server.url)
    said = lama.chat(NAME, [{"role": "user", "content": TEXT, "images": [image]}], options=options)
    lama._client.close()  # it has no public way
    assert said.message.content
    assert wanted.startswith(said.message.content)


def test_images_in_one_batch_keep_their_answers(server: Server, answers: dict[int, str]) -> None:
    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=NAME,
                        messages=messages(png(seed)),
                        max_tokens=NUM_TOKENS,
                        temperature=0,
                        extra_body={"ignore_eos": True},
                    )
                    for seed in (THIRD, FIRST, SECOND, FIRST)
                )
            )
        return [reply.choices[0].message.content or "" for reply in replies]

    assert asyncio.run(together()) == [answers[seed] for seed in (THIRD, FIRST, SECOND, FIRST)]


def test_model_list_marks_image_input(server: Server) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image"]


@pytest.mark.parametrize("image", [b"no image", png(FIRST)[:100], b""], ids=["text", "cut", "empty"])
def test_bad_image_is_refused_with_a_message(server: Server, image: bytes) -> None:
    reply = chat(server, image)
    assert reply.status_code == 400
    assert "messages.0.content.0" in reply.json()["error"]["message"]
    assert server.health() == 200


def test_url_of_an_unnamed_host_is_refused(server: Server) -> None:
    parts: Any = [{"type": "image_url", "image_url": "http://127.0.0.1:1/x.png"}]
    reply = chat(server, messages=[{"role": "user", "content": parts}])
    assert reply.status_code == 400
    assert "--allowed-media-domains" in reply.json()["error"]["message"]


def test_answer_after_the_death_of_the_core_is_the_same(server: Server, answers: dict[int, str]) -> None:
    pid = server.core_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # While no core is up, new requests are refused.
    is_back = lambda: server.core_pid() not in (None, pid) and server.health() == 200  # noqa: E731
    wait_until(is_back, HEALTHY_WITHIN_S, server.last_words)
    reply = chat(server, png(SECOND))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == answers[SECOND]
