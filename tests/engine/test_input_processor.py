# SPDX-License-Identifier: Apache-2.0
"""Every prompt form, and every bad value that needs the model to be seen as bad."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.messages import add_message
from quire.engine.startup import load_tokenizer, prepare
from quire.errors import ContextLengthError, ValidationError
from quire.sampling_params import SamplingParams
from tests.fixtures.folded import folded


def make_processor(model_dir: Path, **args: Any) -> InputProcessor:
    config = prepare(EngineConfig.from_args(model=str(model_dir), **args), "offline")
    return InputProcessor(config, load_tokenizer(config))


@pytest.fixture(scope="module")
def processor(null_model_dir: Path) -> InputProcessor:
    return make_processor(null_model_dir)


def test_text_ids_and_dicts_become_the_same_request(processor: InputProcessor) -> None:
    assert processor.tokenizer is not None
    ids = processor.tokenizer.encode("the quick fox")
    forms = ["the quick fox", ids, {"prompt": "the quick fox"}, {"prompt_token_ids": ids}]
    assert all(processor.tokenize(form).token_ids == ids for form in forms)


@folded(
    ("prompt", "message"),
    [
        ("", "must not be empty"),
        ([], "must not be empty"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "a", "extra": 1}, "unknown prompt field 'extra'"),
        (3, "must be text or token ids"),
        ([-1], "token ids are integers in"),
        ([10**6], "token ids are integers in"),
        ([2**63], "token ids are integers in"),
        ([1.5], "token ids are integers in"),
        ([True], "token ids are integers in"),
        (["1"], "token ids are integers in"),
        ([1] * 128, "128 tokens in the prompt"),
        ([-1] * 128, "128 tokens in the prompt"),
        ({"prompt_token_ids": "12"}, "'prompt_token_ids' must be a list"),
        ("\ud800", "lone surrogate"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "1 to 128 characters"),
        ({"prompt": "a", "cache_salt": ""}, "1 to 128 characters"),
    ],
)
def test_bad_prompts_are_refused(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        processor.process("r", processor.tokenize(prompt), SamplingParams())


def test_no_request_looks_for_plug_ins(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(**_: Any) -> None:
        raise AssertionError("it reads files of every installed package")

    monkeypatch.setattr("quire.plugins.entry_points", search)
    params = SamplingParams(temperature=0.5, stop_token_ids=[1], bad_words=["a"])
    assert processor.process("r", processor.tokenize("the quick fox"), params)
    with pytest.raises(ValidationError, match="this engine has none"):
        processor.process("r", processor.tokenize("the quick fox"), SamplingParams(extra_args={"a": 1}))


def test_huge_text_is_refused_before_it_is_tokenized(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(processor.tokenizer, "encode", encode)
    for prompt in ("x" * 10**6, {"prompt": "é" * 10**6}):
        with pytest.raises(ValidationError, match=r"context length is 128 tokens, .* at least \d+ tokens"):
            processor.tokenize(prompt)  # type: ignore[arg-type]


@folded(
    ("params", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {-2: 1.0}}, "logit_bias"),
    ],
)
def test_parameters_are_checked_against_the_model(
    processor: InputProcessor, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        processor.process("r", processor.tokenize([1, 2]), SamplingParams(**params))
    assert caught.value.param == param


@pytest.mark.parametrize("max_tokens", [126, 128, 500, 2**63 - 1])
def test_max_tokens_beyond_the_context_is_reduced_to_it(null_model_dir: Path, max_tokens: int) -> None:
    processor = make_processor(null_model_dir)
    (request,) = processor.process("r", processor.tokenize([1, 2, 3]), SamplingParams(max_tokens=max_tokens))
    assert request.sampling_params.max_tokens == processor.room(3) == 125


def test_no_max_tokens_fills_the_context(processor: InputProcessor) -> None:
    (request,) = processor.process("r", processor.tokenize([1, 2, 3]), SamplingParams(max_tokens=None))
    assert request.sampling_params.max_tokens == 125


def test_prompt_that_fills_the_context_has_an_error_code(processor: InputProcessor) -> None:
    with pytest.raises(
        ContextLengthError, match=r"maximum context length is 128 tokens, .* 128 tokens in the prompt"
    ):
        processor.process("r", processor.tokenize([1] * 128), SamplingParams())


def test_seeds_follow_the_engine_seed_and_the_order_of_requests(null_model_dir: Path) -> None:
    def seeds(engine_seed: int) -> list[int | None]:
        processor = make_processor(null_model_dir, seed=engine_seed)
        prompt = processor.tokenize([1])
        return [processor.process("r", prompt, SamplingParams())[0].sampling_params.seed for _ in range(3)]

    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)
    assert len(set(seeds(0))) == 3


def test_n_fans_out_with_consecutive_seeds(processor: InputProcessor) -> None:
    requests = processor.process("r", processor.tokenize([1]), SamplingParams(n=3, seed=2**63 - 2))
    assert [request.request_id for request in requests] == ["r.0", "r.1", "r.2"]
    assert [request.sampling_params.seed for request in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert all(request.sampling_params.n == 1 for request in requests)


def test_later_completions_fork_the_first_without_its_logprobs(
    processor: InputProcessor,
) -> None:
    requests = processor.process("r", processor.tokenize([1]), SamplingParams(n=3, prompt_logprobs=1))
    assert [request.fork_of for request in requests] == [None, "r.0", "r.0"]
    assert all(request.prompt_token_ids is requests[0].prompt_token_ids for request in requests)
    assert [request.sampling_params.prompt_logprobs for request in requests] == [1, None, None]


def test_without_a_tokenizer_only_ids_work(null_model_dir: Path) -> None:
    processor = make_processor(null_model_dir, skip_tokenizer_init=True)
    with pytest.raises(ValidationError, match="need a tokenizer"):
        processor.tokenize("text")
    with pytest.raises(ValidationError, match="stop strings need a tokenizer"):
        processor.process("r", processor.tokenize([1]), SamplingParams(stop="x"))
    assert processor.process("r", processor.tokenize([1]), SamplingParams())


def test_a_prompt_beyond_the_step_needs_chunked_prefill(null_model_dir: Path) -> None:
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    chunked = make_processor(null_model_dir, **limits)
    assert chunked.process("r", chunked.tokenize([1] * 17), SamplingParams())
    whole = make_processor(null_model_dir, enable_chunked_prefill=False, **limits)
    with pytest.raises(ValidationError, match="without chunked prefill a step takes 16"):
        whole.process("r", whole.tokenize([1] * 17), SamplingParams())


def test_priority_is_not_silently_ignored(processor: InputProcessor) -> None:
    with pytest.raises(ValidationError, match="fcfs"):
        processor.process("r", processor.tokenize([1]), SamplingParams(), priority=1)


def test_prepared_config_has_no_automatic_value_left(processor: InputProcessor) -> None:
    config = processor.config
    assert config.scheduler.max_num_seqs > 0
    assert config.scheduler.max_num_batched_tokens > 0
    assert config.model.max_model_len == 128
    assert "auto" not in dataclasses.asdict(config.model)["dtype"]


@pytest.mark.parametrize("n", [1, 8])
def test_completions_of_a_prompt_share_large_fields(processor: InputProcessor, n: int) -> None:
    params = SamplingParams(n=n, allowed_token_ids=list(range(200)), logit_bias={1: 2.0}, seed=7)
    requests = processor.process("r", processor.tokenize([1, 2]), params)
    assert len(requests) == n
    for index, request in enumerate(requests):
        own = request.sampling_params
        assert own.allowed_token_ids is params.allowed_token_ids
        assert own.logit_bias is params.logit_bias
        assert (own.n, own.seed) == (1, 7 + index)


def test_stop_strings_stay_in_the_front_end(processor: InputProcessor) -> None:
    params = SamplingParams(n=2, stop=["x" * 2000])
    requests = processor.process("r", processor.tokenize([1, 2]), params)
    assert requests[0].sampling_params.stop, "the front end looks for them"
    message = add_message(requests)
    assert all(not one.sampling_params.stop for one in message.requests())
    assert len(msgspec.msgpack.encode(message)) < 500


def test_listed_ids_are_bounded_over_all_sequences(processor: InputProcessor) -> None:
    prompt = processor.tokenize([1, 2])
    params = SamplingParams(allowed_token_ids=[1] * (2**20 // 128))
    processor.process("r", prompt, params.clone(n=128))
    with pytest.raises(ValidationError, match=r"list 8193 token ids, for each of 128 sequences") as error:
        processor.process("r", prompt, params.clone(n=128, stop_token_ids=[1]))
    assert error.value.param == "allowed_token_ids"


@pytest.mark.parametrize("allowed", [["eos"], [5], ["eos", 5, 6]])
def test_a_request_that_could_generate_nothing_is_refused(
    processor: InputProcessor, allowed: list[Any]
) -> None:
    assert processor.tokenizer is not None
    ids = [processor.tokenizer.eos_token_id if one == "eos" else one for one in allowed]
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=[5, 6], min_tokens=1)
    prompt = processor.tokenize([1])
    with pytest.raises(ValidationError, match="only tokens that end the generation") as error:
        processor.process("r", prompt, params)
    assert error.value.param == "allowed_token_ids"
    processor.process("r", prompt, params.clone(min_tokens=0))
    processor.process("r", prompt, params.clone(allowed_token_ids=[*ids, 7]))


def test_not_every_token_may_end_a_generation_that_must_not_end(processor: InputProcessor) -> None:
    everything = list(range(processor.config.arch.vocab_size))
    params = SamplingParams(stop_token_ids=everything, min_tokens=1)
    with pytest.raises(ValidationError, match="every token"):
        processor.process("r", processor.tokenize([1]), params)
    processor.process("r", processor.tokenize([1]), params.clone(stop_token_ids=everything[1:]))


def test_other_threads_run_while_a_long_text_is_tokenized(processor: InputProcessor) -> None:
    assert processor.tokenizer is not None
    text = "the quick brown fox jumps over. " * 2**15
    work = threading.Thread(target=processor.tokenizer.encode, args=(text,))
    num_turns = 0
    work.start()
    while work.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10, "tokenizing kept the interpreter for itself"


def test_code_does_not_go_to_another_process(processor: InputProcessor) -> None:
    prompt = processor.tokenize("hello")
    with pytest.raises(ValidationError, match="cannot be sent to the engine core's process"):
        processor.process("r", prompt, SamplingParams(logits_processors=[print]))


def test_bad_words_become_tokens_with_and_without_a_space(processor: InputProcessor) -> None:
    assert processor.tokenizer is not None
    params = SamplingParams(bad_words=["cat", " dog"], bad_words_token_ids=[[5, 6]])
    (request,) = processor.process("r", processor.tokenize("hello"), params)
    encode = processor.tokenizer.encode
    expected = [encode(text, add_special_tokens=False) for text in ("cat", " cat", "dog", " dog")]
    assert set(request.sampling_params.bad_words_token_ids) == {(5, 6), *map(tuple, expected)}
    assert add_message([request]).request.sampling_params.bad_words == (), "text stays in the front end"
