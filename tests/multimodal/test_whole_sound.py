# SPDX-License-Identifier: Apache-2.0
"""The whole way of a sound, from `LLM` over features, tower and rows to the tokens and logprobs of transformers."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from tests.fixtures.hearing_models import (
    BEGIN,
    HEARING,
    IMAGE_TOKEN,
    RATE,
    SOUND_TOKEN,
    VIDEO_TOKEN,
    Samples,
    make_hearing,
    sound,
)
from tests.fixtures.quick import quick

NUM_TOKENS = 5
NEVER = dict.fromkeys((BEGIN, SOUND_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN), -100.0)
PARAMS = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1, logit_bias=NEVER
)
ONE, TWO, ODD = sound(9_000), sound(16_000, 1), sound(4_777, 2)
PROMPTS: dict[str, list[int | Samples]] = {
    "one": [1, 11, ONE, 13, 17],
    "two": [1, TWO, 10, ONE, 23],
    "second turn": [1, *range(20, 41), ODD, 3, 4, 8],
    "the same": [1, ODD, 7, ODD, 8],
    "text": [1, *range(8, 31)],
}
Made = tuple[str, Any, Path, LLM]


def opened(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_model_len=256, max_num_seqs=6, **options)


@pytest.fixture(name="made", scope="module", params=quick(HEARING, ("qwen2-audio", "voxtral")))
def _made(request: Any, tmp_path_factory: Any) -> Iterator[Made]:
    path = tmp_path_factory.mktemp(request.param)
    model = make_hearing(request.param, path)
    llm = opened(path, max_num_batched_tokens=32)
    ask(llm, "two")  # starts the two processes that decode, which stay
    yield request.param, model, path, llm
    llm.shutdown()


def prompt_of(kind: str) -> dict[str, Any]:
    ids = [part if isinstance(part, int) else SOUND_TOKEN for part in PROMPTS[kind]]
    sounds = [(part, RATE) for part in PROMPTS[kind] if not isinstance(part, int)]
    return {"prompt_token_ids": ids} | ({"multi_modal_data": {"audio": sounds}} if sounds else {})


def bits_of(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.outputs[0].token_ids)
    rows = output.outputs[0].logprobs
    return tokens, [row[token].logprob for token, row in zip(tokens, rows, strict=True)]


def ask(llm: LLM, *kinds: str) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate([prompt_of(kind) for kind in kinds], PARAMS, use_tqdm=False)
    return [bits_of(output) for output in outputs]


def test_a_batch_gives_tokens_and_logprobs_of_transformers(made: Made) -> None:
    name, model, _, llm = made
    outputs = llm.generate([prompt_of(kind) for kind in PROMPTS], PARAMS, use_tqdm=False)
    for parts, output in zip(PROMPTS.values(), outputs, strict=True):
        wanted = [part if isinstance(part, int) else HEARING[name].tokens(len(part)) for part in parts]
        ids = [each for part in wanted for each in (part if isinstance(part, list) else [part])]
        assert list(output.prompt_token_ids or []) == ids
        tokens, logprobs = bits_of(output)
        sounds = [part for part in parts if not isinstance(part, int)]
        inputs = HEARING[name].inputs(sounds) if sounds else {}
        row = torch.tensor([ids + tokens])
        with torch.inference_mode():
            logits = model(
                input_ids=row, attention_mask=torch.ones_like(row), **inputs, use_cache=False
            ).logits
        want = logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        assert np.allclose(logprobs, want[range(NUM_TOKENS), tokens].numpy(), atol=2e-3)
        want[:, list(NEVER)] -= 100.0
        assert tokens == want.argmax(-1).tolist()


def test_bits_depend_on_no_company_chunks_or_caches(made: Made) -> None:
    _, _, path, llm = made
    want = ask(llm, *PROMPTS)
    assert ask(llm, *PROMPTS) == want, "from the caches of prefixes and embeddings"
    assert [ask(llm, kind)[0] for kind in PROMPTS] == want
    llm.reset_prefix_cache()
    assert ask(llm, *reversed(PROMPTS)) == want[::-1]
    other = opened(path, enable_prefix_caching=False, max_num_batched_tokens=256)
    assert ask(other, *PROMPTS) == want
    other.shutdown()


def test_chat_and_prompts_take_every_form_of_a_sound(made: Made) -> None:
    name, _, path, llm = made
    file = path / "a.wav"
    integers = (ONE * 32767).astype("<i2")
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(integers.tobytes())
    marker = HEARING[name].marker
    data: list[Any] = [(integers, RATE), [(integers, RATE)], str(file), [str(file)], integers]
    outputs = llm.generate(
        [{"prompt": f"{marker} t5 t6", "multi_modal_data": {"audio": each}} for each in data],
        PARAMS,
        use_tqdm=False,
    )
    parts = [{"type": "audio", "audio": (integers, RATE)}, {"type": "audio_url", "audio_url": str(file)}]
    talks = [[{"role": "user", "content": [part, {"type": "text", "text": "t5 t6"}]}] for part in parts]
    outputs += llm.chat(talks, PARAMS, use_tqdm=False)
    assert len({str(bits_of(output)) for output in outputs}) == 1


def test_sounds_that_do_not_match_the_prompt_are_refused(made: Made) -> None:
    name, _, _, llm = made
    for ids, data in (
        ([1, 2], {"audio": ONE}),
        ([1, SOUND_TOKEN, SOUND_TOKEN], {"audio": ONE}),
        ([1, SOUND_TOKEN], {"image": np.zeros((4, 4, 3), np.uint8)}),
        ([1, SOUND_TOKEN], {"audio": np.full(900, np.nan)}),
    ):
        with pytest.raises(ValidationError):
            llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, PARAMS, use_tqdm=False)
    with pytest.raises(ValidationError, match="or a sound, and none is sent"):
        llm.generate({"prompt_token_ids": [1, SOUND_TOKEN, 2]}, PARAMS, use_tqdm=False)
    assert name in HEARING
