# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoder-decoder models: forms, languages, limits, the server's route, and hostile inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

from quire import LLM, SamplingParams
from quire.errors import ContextLengthError, ModelLoadError, StartupError, ValidationError
from tests.seq2seq.tiny import END, LENGTH, START, greedy, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
ENGLISH, FRENCH = 80, 81
WORDS = {
    "<s>": 0,
    "<pad>": 1,
    "</s>": 2,
    "<unk>": 3,
    **{f"w{number}": number for number in range(4, ENGLISH)},
}


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of words with NLLB's form: a text's language before it, its end behind it."""
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "eng_Latn", "fra_Latn"])
    backend.post_processor = processors.TemplateProcessing(
        single="eng_Latn $A </s>", special_tokens=[("eng_Latn", ENGLISH), ("</s>", END)]
    )
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    path = tmp_path_factory.mktemp("m2m100")
    model = save("m2m100", path)
    save_tokenizer(path)
    llm = LLM(str(path), dtype="float32")
    yield model, llm
    llm.shutdown()


def ids_of(llm: LLM, prompt: Any) -> list[int]:
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_text_is_the_encoders(translator: tuple[Any, LLM]) -> None:
    model, llm = translator
    (output,) = llm.generate(["w5 w6"], GREEDY, use_tqdm=False)
    assert output.prompt == "w5 w6"
    assert output.prompt_token_ids == [ENGLISH, 5, 6, END]
    assert list(output.outputs[0].token_ids) == greedy(model, [ENGLISH, 5, 6, END], 5)[0]


def test_languages_are_put_where_the_tokenizer_has_them(translator: tuple[Any, LLM]) -> None:
    model, llm = translator
    prompt = {"prompt": "w5 w6", "source_language": "fra_Latn", "target_language": "eng_Latn"}
    assert ids_of(llm, prompt) == greedy(model, [FRENCH, 5, 6, END], 5, [START, ENGLISH])[0]
    pair = {"encoder_prompt": "w5 w6", "decoder_prompt": "fra_Latn w9"}
    assert ids_of(llm, pair) == greedy(model, [ENGLISH, 5, 6, END], 5, [START, FRENCH, 9])[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "must not be empty"),
        ([], "must not be empty"),
        ({"encoder_prompt": 3}, "must be text, token ids, or a dict"),
        ({"encoder_prompt": "w5", "prompt": "w6"}, "takes the place of"),
        ({"encoder_prompt": "w5", "decoder_prompt": [1.5]}, "'decoder_prompt' must be text or token ids"),
        ({"encoder_prompt": "w5", "decoder_prompt": [96]}, "token ids are integers in"),
        ({"prompt": "w5", "target_language": "xx_YY"}, "languages are eng_Latn, fra_Latn"),
        ({"prompt": "w5", "source_language": 7}, "source_language is 7"),
        ({"prompt": "w5", "target_language": "eng_Latn", "decoder_prompt": [5]}, "give one"),
        ([5, 96], "token ids are integers in"),
        ([5, -1], "token ids are integers in"),
    ],
)
def test_wrong_prompts_are_refused(translator: tuple[Any, LLM], prompt: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ids_of(translator[1], prompt)


def test_too_long_prompts_are_refused_with_the_limit(translator: tuple[Any, LLM]) -> None:
    _, llm = translator
    with pytest.raises(
        ContextLengthError, match=f"maximum input length is {LENGTH} tokens, but there are 41"
    ):
        ids_of(llm, [5] * (LENGTH + 1))
    with pytest.raises(ContextLengthError, match=f"decoder has {LENGTH} positions"):
        ids_of(llm, {"encoder_prompt": [5], "decoder_prompt": [START] * LENGTH})
    assert len(ids_of(llm, [5] * LENGTH)) == 5


def test_output_ends_with_the_decoders_positions(translator: tuple[Any, LLM]) -> None:
    model, llm = translator
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert list(output.outputs[0].token_ids) == greedy(model, [5, 6], LENGTH - 1)[0]


def test_prompt_logprobs_are_refused(translator: tuple[Any, LLM]) -> None:
    with pytest.raises(ValidationError, match="text that an encoder reads"):
        translator[1].generate(["w5"], SamplingParams(prompt_logprobs=1), use_tqdm=False)


def test_chat_is_refused(translator: tuple[Any, LLM]) -> None:
    with pytest.raises(ValidationError, match="chat template"):
        translator[1].chat([{"role": "user", "content": "w5"}])


def test_languages_of_a_model_without_them_are_refused(tmp_path: Path) -> None:
    save("t5", tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    with pytest.raises(ValidationError, match="this model has none"):
        ids_of(llm, {"prompt_token_ids": [5], "target_language": "fra_Latn"})
    llm.shutdown()


def test_weights_that_are_not_finite_cost_their_request(tmp_path: Path) -> None:
    save("t5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.block.0.layer.0.layer_norm.weight"][3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    llm.shutdown()


def test_malformed_generation_config_is_named(tmp_path: Path) -> None:
    save("t5", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 96}')
    with pytest.raises((ModelLoadError, StartupError), match="decoder_start_token_id must be a token id"):
        LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
