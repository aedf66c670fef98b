# SPDX-License-Identifier: Apache-2.0
"""Embeddings of prompts with images, offline and over HTTP: the hidden states of transformers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire import LLM
from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.serving import PATIENT, CheckedClient
from tests.fixtures.seeing_models import IMAGE_TOKEN, make_seeing
from tests.multimodal.test_whole import write_tokenizer

SIDES = [[16, 32], [32, 16], [32, 32]]
FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llava-next": (
        LlavaNextImageProcessorPil,
        "<image>",
        {
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": SIDES,
        },
    ),
    "qwen2-vl": (
        Qwen2VLImageProcessorPil,
        "<|image_pad|>",
        {
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 4096},
        },
    ),
}
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "runner": "pooling"}
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}MARKER {% else %}{{ part.text }} "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}t9{% endif %}"
)


def write_files(name: str, path: Path) -> None:
    processor, marker, options = FAMILIES[name]
    kind = processor.__name__.removesuffix("Pil")
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **options}))
    write_tokenizer(path, marker=marker)
    template = {"chat_template": TEMPLATE.replace("MARKER", marker)}
    (path / "tokenizer_config.json").write_text(json.dumps(template))


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 33, 3), dtype=np.uint8))


def vector_of(name: str, model: Any, token_ids: list[int], image: Image.Image | None) -> torch.Tensor:
    """The last token's hidden state of transformers' model, normalized."""
    processor, _, options = FAMILIES[name]
    ids = torch.tensor([token_ids])
    given = {} if image is None else dict(processor(**options)(image, return_tensors="pt"))
    if name == "qwen2-vl":
        given["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    with torch.no_grad():
        hidden = model(input_ids=ids, **given, output_hidden_states=True).hidden_states[-1][0, -1]
    return hidden / hidden.norm()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_embedding_of_an_image_is_transformers(name: str, tmp_path: Path) -> None:
    """A prompt of an image, one of text and one of another image; then with a warm cache, in other chunks."""
    model = make_seeing(name, tmp_path)
    write_files(name, tmp_path)
    llm = LLM(str(tmp_path), max_num_batched_tokens=16, **ENGINE)
    data: Any = [{"multi_modal_data": {"image": picture(seed)}} for seed in (0, 1)]
    prompts: Any = [
        {"prompt_token_ids": [1, IMAGE_TOKEN, 2, 3], **data[0]},
        [1, 5, 2, 3],
        {"prompt": f"t1 {FAMILIES[name][1]} t2 t3", **data[1]},
    ]
    outputs = llm.embed(prompts, use_tqdm=False)
    again = llm.embed(prompts[::-1], use_tqdm=False)[::-1]
    llm.shutdown()
    assert [one.outputs for one in again] == [one.outputs for one in outputs]
    assert again[0].num_cached_tokens > 0
    for output, image in zip(outputs, (picture(0), None, picture(1)), strict=True):
        found = torch.tensor(output.outputs.embedding)
        assert (found - vector_of(name, model, output.prompt_token_ids, image)).abs().max() < 1e-5


def message(image: bytes, text: str = "t2 t3") -> list[Any]:
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": [{"type": "text", "text": "t1"}, *parts]}]


async def test_messages_have_the_embedding_of_a_prompt(tmp_path: Path) -> None:
    make_seeing("llava-next", tmp_path)
    write_files("llava-next", tmp_path)
    llm = LLM(str(tmp_path), **ENGINE)
    prompts: Any = [
        {"prompt": f"t1 <image> t2 t3{end}", "multi_modal_data": {"image": picture()}} for end in ("", " t9")
    ]
    wanted, asked = (one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False))
    llm.shutdown()
    file = io.BytesIO()
    picture().save(file, "PNG")
    engine = AsyncLLM(EngineConfig.from_args(model=str(tmp_path), **ENGINE), in_process=True)
    await engine.wait_ready()
    app = build_app(engine, ServerConfig(**PATIENT))
    async with CheckedClient(app) as client:
        openai_client = openai.AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=client)
        body: dict[str, Any] = {"messages": message(file.getvalue()), "encoding_format": "float"}
        for _ in ("cold", "warm"):
            more = {"input": None, "messages": body["messages"]}
            made = await openai_client.embeddings.create(model="", input="", extra_body=more)
            assert np.array(made.data[0].embedding, np.float32).tolist() == wanted
        reply = (await client.post("/v1/embeddings", json=body)).json()
        details = reply["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] == reply["usage"]["prompt_tokens"] - 3
        assert details["cached_tokens"] > 0
        pooled = await client.post("/pooling", json=body | {"task": "embed", "add_generation_prompt": True})
        assert pooled.json()["data"][0]["data"] == asked != wanted
        await _refuses_what_it_must(client, body)
    await engine.shutdown()
    app.state.server.media.close()


async def _refuses_what_it_must(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    cases = {
        "messages.0.content.1": body | {"messages": message(b"no image")},
        "input and messages cannot be sent together": body | {"input": "t1"},
        "average_windows is for input": body | {"average_windows": True},
        "media cannot be cut to 5": body | {"truncate_prompt_tokens": 5},
    }
    for words, wrong in cases.items():
        reply = await client.post("/v1/embeddings", json=wrong)
        assert reply.status_code == 400, reply.text
        assert words in reply.text
