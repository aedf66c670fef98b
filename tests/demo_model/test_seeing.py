# SPDX-License-Identifier: Apache-2.0
"""The included model that sees: transformers' tokens, one answer at every door, and what it is worth."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, LlavaForConditionalGeneration
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from demo_model import train_seeing
from demo_model.evaluate_seeing import SEED, answers, asked, report
from demo_model.pictures import Example, examples
from demo_model.train_seeing import ASSETS, IMAGE, NUM_PATCHES
from quire import LLM, SamplingParams
from quire.config import DEMO_VISION
from quire.entrypoints.cli.main import main
from quire.outputs import RequestOutput
from tests.end_to_end.server import Server

MOST_BYTES = 6 << 20
FEWEST_RIGHT = 0.7
BLIND = {"Hello!": train_seeing.GREETING, "What is the capital of France?": train_seeing.NO_PICTURE}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}


@pytest.fixture(scope="module")
def found() -> list[Example]:
    return list(examples(SEED, 60))


@pytest.fixture(scope="module")
def outputs(found: list[Example]) -> list[RequestOutput]:
    """Return what `LLM.chat` answers about each picture, then to `BLIND`."""
    llm = LLM(DEMO_VISION, dtype="float32", cpu_threads=1)
    chats: list[Any] = [asked(image, question.text) for image, question in found]
    chats += [[{"role": "user", "content": text}] for text in BLIND]
    outputs = llm.chat(chats, SamplingParams(**GREEDY), use_tqdm=False)
    llm.shutdown()
    return outputs


@pytest.fixture(scope="module")
def png(found: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    found[0][0].save(path)
    return path


def test_vision_model_equals_transformers(outputs: list[RequestOutput], found: list[Example]) -> None:
    model: Any = LlavaForConditionalGeneration.from_pretrained(ASSETS, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(ASSETS)
    processor = SiglipImageProcessorPil.from_pretrained(ASSETS)
    for (image, question), output in zip(found[:4], outputs, strict=False):
        parts = [{"type": "image"}, {"type": "text", "text": question.text}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        ).replace(IMAGE, IMAGE * NUM_PATCHES)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        pixels = processor(image, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            whole = model.generate(
                **inputs, pixel_values=pixels, do_sample=False, top_k=None, max_new_tokens=32
            )
        assert output.outputs[0].token_ids == whole[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_api_answers_as_llm_chat(
    outputs: list[RequestOutput], found: list[Example], tmp_path: Path
) -> None:
    server = Server("quire-demo-vision", "--dtype", "float32", log=tmp_path / "log").wait_ready()
    try:
        for (image, question), output in zip(found[:2], outputs, strict=False):
            url = f"data:image/png;base64,{base64.b64encode(as_png(image)).decode()}"
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": question.text},
            ]
            body = {"messages": [{"role": "user", "content": parts}], **GREEDY}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            assert reply["choices"][0]["message"]["content"] == output.outputs[0].text
            assert reply["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_PATCHES
    finally:
        server.stop()


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_run_with_an_image_finds_it(
    outputs: list[RequestOutput], found: list[Example], png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float32", "--cpu-threads", "1"]
    assert main(["run", "--image", str(png), found[0][1].text, *options]) == 0
    assert capsys.readouterr().out.strip() == outputs[0].outputs[0].text


def test_model_answers_about_unseen_pictures(outputs: list[RequestOutput], found: list[Example]) -> None:
    texts = [output.outputs[0].text for output in outputs[: len(found)]]
    count, right = report(found, texts)["overall"]
    assert right >= FEWEST_RIGHT * count


def test_answer_without_picture_requests_one(outputs: list[RequestOutput]) -> None:
    texts = [output.outputs[0].text for output in outputs[-len(BLIND) :]]
    assert texts == list(BLIND.values())


def test_vision_model_file_is_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < MOST_BYTES


@pytest.mark.more
def test_a_few_steps_make_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_seeing, "EYES_FIRST", 0.4)
    folders = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    for more in (["--steps", "3"], ["--steps", "4", "--resume"]):
        monkeypatch.setattr(sys, "argv", ["train", "--pictures", "2", *folders, *more])
        train_seeing.main()
    llm = LLM(str(tmp_path / "out"), max_model_len=128)
    assert len(answers(llm, list(examples(1, 1)))) == 1
    llm.shutdown()
