# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder families against transformers, in any batch and chunks, and with a shared encoder's output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.fixtures.quick import quick
from tests.seq2seq.tiny import MODELS, decoder_start, greedy, save, texts

COUNT = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
TEXTS = texts(5, 33, 1, 20)
QUICK = ("bart", "m2m100", "marian", "umt5", "flan", "t5")


def found(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each output."""
    pairs = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None, completion.stop_reason
        ids = list(completion.token_ids)
        pairs.append(
            (ids, [each[token].logprob for each, token in zip(completion.logprobs, ids, strict=True)])
        )
    return pairs


@pytest.fixture(scope="module", params=quick(list(MODELS), QUICK))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, LLM]]:
    """A model of transformers, and an engine with chunks that end inside the encoder's output."""
    path = tmp_path_factory.mktemp(request.param)
    model = save(request.param, path)
    llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=70)
    yield model, llm
    llm.shutdown()


def test_tokens_and_logprobs_equal_transformers(loaded: tuple[Any, LLM]) -> None:
    model, llm = loaded
    together = llm.generate(list(TEXTS), GREEDY, use_tqdm=False)
    for text, output, (ids, logprobs) in zip(TEXTS, together, found(together), strict=True):
        wanted, wanted_logprobs = greedy(model, text, COUNT)
        assert ids == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=2e-4)
        assert output.prompt_token_ids == text


def test_bits_do_not_depend_on_company(loaded: tuple[Any, LLM]) -> None:
    _, llm = loaded
    runs = []
    for prompts in ([list(TEXTS)], [[text] for text in reversed(TEXTS)]):
        assert llm.reset_prefix_cache()
        assert llm.reset_encoder_cache()
        runs.append([found(llm.generate(each, GREEDY, use_tqdm=False)) for each in prompts])
    (together,), apart = runs
    alone = [each for (each,) in apart]
    assert alone[::-1] == together
    cached = llm.generate(list(TEXTS), GREEDY, use_tqdm=False)
    assert found(cached) == together
    assert [output.num_cached_tokens for output in cached] == list(map(len, TEXTS))


def test_longer_decoder_prompt_than_text(loaded: tuple[Any, LLM]) -> None:
    model, llm = loaded
    start = [decoder_start(model)[0], 7, 8, 9, 10, 11]
    prompts = [{"encoder_prompt": text, "decoder_prompt": start} for text in texts(2, 4, 30)]
    outputs = found(llm.generate(prompts, GREEDY, use_tqdm=False))
    for text, (ids, _) in zip(texts(2, 4, 30), outputs, strict=True):
        assert ids == greedy(model, text, COUNT, start)[0]


def test_preempted_requests_have_the_same_bits(tmp_path: Path) -> None:
    save("t5", tmp_path)
    many = texts(*[30] * 6)

    def run(**options: Any) -> tuple[list[Any], int]:
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=128, **options)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
        outputs = llm.generate(list(many), params, use_tqdm=False)
        preempted = sum(output.metrics.num_preemptions for output in outputs)
        llm.shutdown()
        return found(outputs), preempted

    whole, none = run()
    short, some = run(num_gpu_blocks_override=26, block_size=16)
    assert (none == 0, some > 0, short == whole) == (True, True, True)
