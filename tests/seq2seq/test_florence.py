# SPDX-License-Identifier: Apache-2.0
"""Florence-2 against transformers: an encoder that reads an image and a text."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from quire import LLM, SamplingParams, florence2_answer
from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from quire.errors import ValidationError
from quire.sampling_params import BeamSearchParams
from tests.seq2seq.images import END, PAD, START, VOCAB, WORDS, picture
from tests.seq2seq.test_models import found

IMAGE, SIDE, COUNT = 90, 48, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {
    "size": {"height": SIDE, "width": SIDE},
    "do_center_crop": False,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
EYES = {
    "depths": [1, 2, 1],
    "patch_size": [7, 3, 3],
    "patch_stride": [4, 2, 2],
    "patch_padding": [3, 1, 1],
    "patch_prenorm": [False, True, True],
    "embed_dim": [8, 16, 24],
    "num_heads": [2, 2, 3],
    "num_groups": [2, 2, 3],
    "window_size": 5,
    "projection_dim": 32,
    "max_position_embeddings": 5,
    "drop_path_rate": 0.0,
}
TEXT = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}
NUM_ROWS = 10  # 3 x 3 patches and their mean
FIRST_WORD = 20
QUESTION_WORDS = ["Locate", "the", "region", "proposals", "in", "image", ".", "What", "is", "?"]
PROPOSALS = [20, 21, 22, 23, 24, 21, 25, 26]  # Locate the region proposals in the image.
PLACES = {"<loc_100>": 91, "<loc_200>": 92, "<sep>": 93}
BOX = [20, 20, 20, 20]
"""Pixels of <loc_100> four times, in an image of 200 x 200."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("florence")
    torch.manual_seed(6)
    config = transformers.Florence2Config(vision_config=EYES, text_config=TEXT, image_token_id=IMAGE)
    model = transformers.Florence2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            mean = 1.0 if is_norm and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1 if is_norm else 0.3)
    model.tie_weights()
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(OPTIONS))
    named = dict(enumerate(QUESTION_WORDS, FIRST_WORD))
    words = {named.get(token_id, word): token_id for word, token_id in WORDS.items()}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<image>", *PLACES])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", END)]
    )
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "image_token": "<image>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return model, path


@pytest.fixture
def loaded(checkpoint: tuple[Any, Path]) -> Iterator[tuple[Any, LLM]]:
    llm = LLM(str(checkpoint[1]), dtype="float32", max_num_batched_tokens=70)
    yield checkpoint[0], llm
    llm.shutdown()


@torch.inference_mode()
def expected(model: Any, image: Any, text: list[int]) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their logprobs."""
    ids, logprobs = [START], []
    given: dict[str, Any] = {"input_ids": torch.tensor([text])}
    if image is not None:
        given["pixel_values"] = CLIPImageProcessorPil(**OPTIONS)(image, return_tensors="pt")["pixel_values"]
    for _ in range(COUNT):
        logits = model(**given, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        best = logits.log_softmax(-1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[1:], logprobs


def test_florence_tokens_equal_transformers(loaded: tuple[Any, LLM]) -> None:
    model, llm = loaded
    images = [picture(1), picture(2, 20, 90), picture(3, 200, 11), None]
    prompts: list[Any] = [
        "w5 w6" if image is None else {"prompt": "w5 w6", "multi_modal_data": {"image": image}}
        for image in images
    ]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for image, output, (ids, logprobs) in zip(images, together, found(together), strict=True):
        text = [*([] if image is None else [IMAGE] * NUM_ROWS), 0, 5, 6, END]
        wanted, wanted_logprobs = expected(model, image, text)
        assert output.prompt_token_ids == text
        assert ids == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=5e-4)
    llm.llm_engine.reset_prefix_cache()
    alone = [found(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in reversed(prompts)]
    assert alone[::-1] == found(together)


def test_florence_chat_and_wrong_prompts(loaded: tuple[Any, LLM]) -> None:
    model, llm = loaded
    parts = [{"type": "image_pil", "image_pil": picture(1)}, {"type": "text", "text": "w5"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert (
        list(output.outputs[0].token_ids) == expected(model, picture(1), [*[IMAGE] * NUM_ROWS, 0, 5, END])[0]
    )
    two = {"prompt": "w5", "multi_modal_data": {"image": [picture(1), picture(2)]}}
    spelled = {"prompt": "<image> <image> w5", "multi_modal_data": {"image": picture(1)}}
    for prompt, message in (
        (two, "one image per prompt"),
        ("", "must not be empty"),
        ("<image> w5", "has 1 tokens in whose places"),
        ([0, IMAGE, 5], "has 1 tokens in whose places"),
        (spelled, "2 markers"),
    ):
        with pytest.raises(ValidationError, match=message):
            llm.generate([prompt], GREEDY, use_tqdm=False)


def test_tasks_become_questions_and_places_stay(loaded: tuple[Any, LLM]) -> None:
    _, llm = loaded
    image = picture(1, 200, 200)
    asked = [0, *PROPOSALS, END]
    seen: dict[str, Any] = {"prompt": "<REGION_PROPOSAL>", "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={91: 100.0}, ignore_eos=True)
    with_image, alone, region = llm.generate(
        [seen, "<REGION_PROPOSAL>", {"prompt": "<REGION_TO_CATEGORY><loc_200>"}], params, use_tqdm=False
    )
    assert with_image.prompt_token_ids == [*[IMAGE] * NUM_ROWS, *asked]
    assert alone.prompt_token_ids == asked
    assert region.prompt_token_ids == [0, 27, 28, 21, 22, 92, 29, END]
    text = with_image.outputs[0].text
    assert text == "<loc_100>" * 8
    answer = {"<REGION_PROPOSAL>": {"bboxes": [BOX, BOX], "labels": ["", ""]}}
    assert florence2_answer("<REGION_PROPOSAL>", text, image.size) == answer
    (ended,) = llm.generate(["w5"], params.clone(logit_bias={END: 100.0}, ignore_eos=False), use_tqdm=False)
    assert ended.outputs[0].text == ""
    with pytest.raises(ValidationError, match="<OD> takes no text beside it, got 'w5'; tasks with"):
        llm.generate([{**seen, "prompt": "<OD>w5"}], params, use_tqdm=False)
    (searched,) = llm.beam_search([seen], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
    for sequence in searched.sequences:
        places = [token for token in sequence.tokens if token in PLACES.values()]
        assert sequence.text.count("<") == len(places) + sum(token in (3, 90) for token in sequence.tokens)


@pytest.fixture
async def client(checkpoint: tuple[Any, Path]) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig.from_args(model=str(checkpoint[1]), dtype="float32", gpu_memory_utilization=0.02)
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    app = build_app(engine, ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire/v1") as made:
        yield made
    app.state.server.media.close()
    await engine.shutdown()


def asked_of(task: str, **more: Any) -> dict[str, Any]:
    data = io.BytesIO()
    picture(1, 200, 200).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "text", "text": task}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": parts}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **more}


async def test_chat_returns_the_parsed_answer_of_a_task(client: httpx.AsyncClient) -> None:
    body = asked_of("<REGION_PROPOSAL>", logit_bias={"91": 100}, n=2)
    reply = (await client.post("/chat/completions", json=body)).json()
    wanted = {"<REGION_PROPOSAL>": {"bboxes": [BOX, BOX], "labels": ["", ""]}}
    for choice in reply["choices"]:
        assert choice["message"]["content"] == "<loc_100>" * 8
        assert choice["task_answer"] == wanted
    streamed = (await client.post("/chat/completions", json={**body, "stream": True})).text
    lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert [choice["task_answer"] for choice in choices if choice["finish_reason"]] == [wanted] * 2
    assert not any("task_answer" in choice for choice in choices if not choice["finish_reason"])
    searched = asked_of("<REGION_TO_CATEGORY> w5", use_beam_search=True)
    (choice,) = (await client.post("/chat/completions", json=searched)).json()["choices"]
    assert choice["task_answer"] == {"<REGION_TO_CATEGORY>": choice["message"]["content"].strip()}
    (plain,) = (await client.post("/chat/completions", json=asked_of("w5"))).json()["choices"]
    assert "task_answer" not in plain
    wrong = await client.post("/chat/completions", json=asked_of("<OD><OCR>"))
    assert (wrong.status_code, "2 tasks" in wrong.json()["error"]["message"]) == (400, True)
