# SPDX-License-Identifier: Apache-2.0
"""Florence-2 against transformers: an encoder that reads an image and a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from quire import LLM, SamplingParams
from quire.errors import ValidationError
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
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<image>"])
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
