# SPDX-License-Identifier: Apache-2.0
"""The whole way of an image through transformers' processor and encoder to the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from transformers import AyaVisionProcessor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.multimodal.hosted.processor import HostedProcessor
from tests.fixtures.seeing_models import IMAGE_TOKEN, make_seeing

NUM_TOKENS = 6
TOKENS = {
    "aya-vision": ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_1", "TILE_GLOBAL"],
    "vipllava": ["<image>"],
}


def processor_of(name: str) -> Any:
    """transformers' processor, with a tokenizer that has a token for each id."""
    own = {token: IMAGE_TOKEN + index for index, token in enumerate(TOKENS[name])}
    if name == "aya-vision":
        own |= {"TILE_2": 80, "TILE_3": 81, "<image>": 82}
    taken = set(own.values())
    vocab = {f"t{index}": index for index in range(96) if index not in taken} | own
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="t0")
    tokenizer.add_special_tokens({"additional_special_tokens": [*own]})
    if name == "vipllava":
        sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        options = {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        return LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, **options)
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=3)
    return AyaVisionProcessor(images, tokenizer, patch_size=4, img_size=16, downsample_factor=2)


def picture(seed: int, *size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", list(TOKENS))
def test_images_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model, processor = make_seeing(name, tmp_path), processor_of(name)
    processor.save_pretrained(tmp_path)
    pictures = [picture(0, 40, 33), picture(1, 20, 60)]
    text = "t1 <image> t2 t3 <image> t4"
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=256)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate(
        {"prompt": text, "multi_modal_data": {"image": pictures}}, params, use_tqdm=False
    )
    with pytest.raises(ValidationError, match="has 0 markers '<image>' and 1 images"):
        llm.generate({"prompt": "t1", "multi_modal_data": {"image": pictures[0]}}, params, use_tqdm=False)
    llm.shutdown()
    given = dict(processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False))
    ids = given.pop("input_ids")
    assert output.prompt_token_ids == ids[0].tolist()
    with torch.no_grad():
        whole = model.generate(ids, **given, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist()


def test_an_image_that_transformers_refuses_is_an_error(tmp_path: Path) -> None:
    make_seeing("vipllava", tmp_path)
    processor_of("vipllava").save_pretrained(tmp_path)
    processor = HostedProcessor.from_files(tmp_path, {"image_mean": [0.5]})
    with pytest.raises(ValidationError, match="LlavaProcessor of transformers cannot process the image"):
        processor.prepare(picture(0, 4, 4), {})
