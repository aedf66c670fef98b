# SPDX-License-Identifier: Apache-2.0
"""The whole way of an image, from `LLM.generate` over processor, tower and rows to the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire import LLM, SamplingParams
from tests.fixtures.seeing_models import IMAGE_TOKEN, make_seeing

SIDE, NUM_TOKENS = 16, 6
OPTIONS = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}


def write_tokenizer(
    path: Path, names: Mapping[str, str] = MappingProxyType({}), marker: str = "<image>"
) -> None:
    """Write a tokenizer with a token for each id, some of them by other names."""
    tokens = (f"t{index}" for index in range(IMAGE_TOKEN))
    vocab = {names.get(token, token): index for index, token in enumerate(tokens)} | {marker: IMAGE_TOKEN}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens([marker])
    backend.save(str(path / "tokenizer.json"))


def test_an_image_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = make_seeing("llava", tmp_path)
    image = {"image_processor_type": "CLIPImageProcessor", **OPTIONS}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    write_tokenizer(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 33, 3), dtype=np.uint8))
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=128)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [1, IMAGE_TOKEN, 2, 3], "multi_modal_data": {"image": picture}}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    llm.shutdown()
    pixels = CLIPImageProcessorPil(**OPTIONS)(picture, return_tensors="pt")["pixel_values"]
    ids = torch.tensor([output.prompt_token_ids])
    assert (ids == IMAGE_TOKEN).sum() > 1
    with torch.no_grad():
        whole = model.generate(
            ids, pixel_values=pixels, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
    assert output.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [16 + 4, 64])
def test_a_prefix_gives_the_tokens_of_transformers(chunk: int, tmp_path: Path) -> None:
    """Two questions about one image in turn: the cache of a prefix is of no use for another one."""
    model = make_seeing("paligemma", tmp_path)
    options = {"size": {"height": SIDE, "width": SIDE}}
    image = {"image_processor_type": "SiglipImageProcessor", "image_seq_length": 16, **options}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    write_tokenizer(tmp_path, {"t3": "<bos>", "t4": "\n"})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 33, 3), dtype=np.uint8))
    llm = LLM(
        str(tmp_path),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        block_size=8,
        max_num_batched_tokens=chunk,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    pixels = SiglipImageProcessorPil(**options)(picture, return_tensors="pt")["pixel_values"]
    for question in ([9, 8], [9, 7], [9, 8]):
        prompt = {"prompt_token_ids": [3, IMAGE_TOKEN, *question], "multi_modal_data": {"image": picture}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        ids = torch.tensor([[IMAGE_TOKEN] * 16 + [3, *question, 4]])
        assert output.prompt_token_ids == ids[0].tolist()
        with torch.no_grad():
            whole = model.generate(
                ids,
                pixel_values=pixels,
                token_type_ids=torch.zeros_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        assert output.outputs[0].token_ids == whole[0, ids.shape[1] :].tolist()
    llm.shutdown()
