# SPDX-License-Identifier: Apache-2.0
"""TrOCR and Donut against transformers, in any company, through `LLM` and with hostile prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.sampling_params import BeamSearchParams
from tests.fixtures.quick import quick
from tests.seq2seq.images import END, MODELS, START, TASK, greedy, picture, pixels_of, save
from tests.seq2seq.test_models import found

COUNT = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
PICTURES = [picture(1), picture(2, 20, 90), picture(3, 200, 11)]


def prompt_of(image: Any, **fields: Any) -> Any:
    return {"prompt": "", "multi_modal_data": {"image": image}, **fields}


@pytest.fixture(scope="module", params=quick(list(MODELS), ("trocr", "trocr-small", "donut")))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, save(request.param, path), path


@pytest.fixture
def loaded(checkpoint: tuple[str, Any, Path]) -> Iterator[tuple[str, Any, LLM]]:
    name, model, path = checkpoint
    llm = LLM(str(path), dtype="float32", max_num_batched_tokens=70)
    yield name, model, llm
    llm.shutdown()


def test_tokens_of_images_equal_transformers(loaded: tuple[str, Any, LLM]) -> None:
    name, model, llm = loaded
    outputs = llm.generate([prompt_of(image) for image in PICTURES], GREEDY, use_tqdm=False)
    for image, output, (ids, logprobs) in zip(PICTURES, outputs, found(outputs), strict=True):
        wanted, wanted_logprobs = greedy(model, pixels_of(name, image), COUNT)
        assert ids == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=5e-4)
        assert output.prompt_token_ids == [START]


def test_bits_of_images_do_not_depend_on_company(loaded: tuple[str, Any, LLM]) -> None:
    _, _, llm = loaded
    prompts = [prompt_of(image) for image in PICTURES]
    llm.llm_engine.reset_prefix_cache()
    together = found(llm.generate(prompts, GREEDY, use_tqdm=False))
    llm.llm_engine.reset_prefix_cache()
    alone = [found(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in reversed(prompts)]
    assert alone[::-1] == together
    assert found(llm.generate(prompts, GREEDY, use_tqdm=False)) == together


def test_decoder_prompts_follow_transformers(loaded: tuple[str, Any, LLM]) -> None:
    name, model, llm = loaded
    image = PICTURES[0]
    start = [TASK, 7] if name == "donut" else [START, TASK, 7]
    wanted = greedy(model, pixels_of(name, image), COUNT, start)[0]
    data = {"multi_modal_data": {"image": image}}
    forms: list[Any] = [
        prompt_of(image, prompt="<s_task> w7"),
        {"prompt_token_ids": [TASK, 7], **data},
        prompt_of(image, decoder_prompt="<s_task> w7"),
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": [TASK, 7]},
    ]
    for output in llm.generate(forms, GREEDY, use_tqdm=False):
        assert list(output.outputs[0].token_ids) == wanted
        assert output.prompt_token_ids == start


def test_beams_of_images_equal_transformers(loaded: tuple[str, Any, LLM]) -> None:
    name, model, llm = loaded
    (output,) = llm.beam_search(
        [prompt_of(PICTURES[1])], BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=1.0)
    )
    ids = model.generate(
        pixels_of(name, PICTURES[1]),
        num_beams=3,
        max_new_tokens=8,
        decoder_start_token_id=START,
        pad_token_id=1,
        eos_token_id=END,
    )[0].tolist()
    tokens = list(output.sequences[0].tokens)
    assert tokens == ids[1 : 1 + len(tokens)]


WRONG: list[tuple[Any, str]] = [
    ("w5", "reads one image per prompt, got none"),
    ([5], "reads one image per prompt, got none"),
    ({"prompt": "", "multi_modal_data": {"image": [picture(1), picture(2)]}}, "one image per prompt, got 2"),
    ({"prompt": "", "multi_modal_data": {"image": []}}, "one image per prompt, got 0"),
    (prompt_of(picture(1), prompt="w5", decoder_prompt="w6"), "give one"),
    (prompt_of(picture(1), decoder_prompt=[1.5]), "must be text or token ids"),
    (prompt_of(picture(1), decoder_prompt=[96]), "token ids are integers in"),
    ({"prompt_token_ids": [5] * 40, "multi_modal_data": {"image": picture(1)}}, "decoder has 40 positions"),
    (prompt_of(picture(1), target_language="en"), "unknown prompt field"),
]


def test_wrong_requests_of_images_are_refused(loaded: tuple[str, Any, LLM]) -> None:
    _, _, llm = loaded
    for prompt, message in WRONG:
        with pytest.raises(ValidationError, match=message):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    with pytest.raises(ValidationError, match="an encoder reads"):
        llm.generate([prompt_of(picture(1))], SamplingParams(prompt_logprobs=1), use_tqdm=False)


def test_a_chat_of_one_image_is_read(loaded: tuple[str, Any, LLM]) -> None:
    name, model, llm = loaded
    parts = [{"type": "image_pil", "image_pil": PICTURES[0]}, {"type": "text", "text": "<s_task> w7"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    start = [TASK, 7] if name == "donut" else [START, TASK, 7]
    assert list(output.outputs[0].token_ids) == greedy(model, pixels_of(name, PICTURES[0]), COUNT, start)[0]
    with pytest.raises(ValidationError, match=r"one\s+message"):
        llm.chat(
            [
                {"role": "user", "content": "w5"},
                {"role": "assistant", "content": "w5"},
                {"role": "user", "content": parts},
            ]
        )
