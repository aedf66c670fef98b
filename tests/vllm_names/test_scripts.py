# SPDX-License-Identifier: Apache-2.0
"""Scripts as vLLM's users write them, with `quire` for `vllm`, against the included model.

Each theme runs, or ends in a sentence that says what to do.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.sampling_params import BeamSearchParams, StructuredOutputsParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Constructed as most scripts do it."""
    made = LLM(
        model="quire-demo",
        trust_remote_code=True,
        enable_sleep_mode=True,
        task="generate",
        tokenizer_mode="auto",
        dtype="auto",
        gpu_memory_utilization=0.5,
        max_model_len=256,
        disable_log_stats=False,
        disable_custom_all_reduce=True,
        kv_cache_memory_bytes=2**24,
    )
    yield made
    made.shutdown()


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_offline_chat_by_the_tokenizer_answers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text_of(llm, prompt) == ANSWER
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert text_of(llm, {"prompt_token_ids": ids}) == ANSWER
    assert text_of(llm, ids) == ANSWER
    assert llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text == ANSWER


def test_chat_template_of_several_conversations_is_a_list(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    one = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    assert tokenizer.apply_chat_template([QUESTION, QUESTION], tokenize=False) == [one, one]
    upper = "{{ messages[0]['content'] | upper }}"
    shouted = tokenizer.apply_chat_template(QUESTION, chat_template=upper, tokenize=False)
    assert shouted == "WHAT IS THE CAPITAL OF FRANCE?"


def test_template_equals_that_of_transformers(llm: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(llm.llm_engine.config.model_dir)
    for options in ({}, {"add_generation_prompt": True}):
        ours = llm.get_tokenizer().apply_chat_template(QUESTION, tokenize=False, **options)
        assert ours == oracle.apply_chat_template(QUESTION, tokenize=False, **options)


def test_guided_decoding_constrains(llm: LLM) -> None:
    from quire.sampling_params import GuidedDecodingParams  # type: ignore[attr-defined]

    guided = SamplingParams(  # type: ignore[call-arg]
        temperature=0, max_tokens=16, guided_decoding=GuidedDecodingParams(choice=["yes", "no"])
    )
    assert text_of(llm, "Is it?", guided) in ("yes", "no")
    structured = SamplingParams(
        temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert text_of(llm, "Is it?", guided) == text_of(llm, "Is it?", structured)


def test_outputs_have_what_scripts_read(llm: LLM) -> None:
    params = GREEDY.clone(n=1, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert output.prompt == "Hello"
    assert output.finished
    assert output.metrics is not None
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].finish_reason in ("stop", "length")
    default = llm.get_default_sampling_params()
    assert default.clone(max_tokens=3).max_tokens == 3


def test_beam_search_returns_sequences(llm: LLM) -> None:
    (found,) = llm.beam_search("The capital", BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(found.sequences) == 2
    with pytest.raises(ValidationError, match=r"LLM\.beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


def test_sleep_and_prefix_cache_work_as_there(llm: LLM) -> None:
    before = text_of(llm, "Hello")
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up()
    assert llm.reset_prefix_cache()
    assert text_of(llm, "Hello") == before


def test_worker_and_model_can_be_called(llm: LLM) -> None:
    def called(worker: Any, one: int, *, two: int) -> tuple[str, int, int]:
        return type(worker).__name__, one, two

    assert llm.collective_rpc(called, args=(1,), kwargs={"two": 2}) == [("Worker", 1, 2)]
    (size,) = llm.collective_rpc("kv_cache_specs")
    assert size
    (count,) = llm.apply_model(lambda model: sum(one.numel() for one in model.parameters()))
    assert count >= 0
    with pytest.raises(AttributeError, match="nothing_such"):
        llm.collective_rpc("nothing_such")
    with pytest.raises(ZeroDivisionError):
        llm.apply_model(lambda model: 1 / 0)
    with pytest.raises(ValidationError, match="takes no timeout"):
        llm.collective_rpc("kv_cache_specs", timeout=3)
    assert text_of(llm, "Hello")


def test_metrics_count_generated_tokens(llm: LLM) -> None:
    from quire.metrics.reader import Counter, Gauge, Histogram

    def counted() -> int:
        return sum(
            one.value
            for one in llm.get_metrics()
            if isinstance(one, Counter) and one.name == "vllm:generation_tokens"
        )

    before = counted()
    (output,) = llm.generate("Hello", GREEDY.clone(ignore_eos=True, max_tokens=5), use_tqdm=False)
    assert counted() - before == len(output.outputs[0].token_ids) == 5
    kinds = {type(one) for one in llm.get_metrics()}
    assert {Counter, Gauge, Histogram} <= kinds
    running = next(one for one in llm.get_metrics() if one.name == "vllm:num_requests_running")
    assert isinstance(running, Gauge)
    assert running.value == 0
    times = next(one for one in llm.get_metrics() if one.name == "vllm:time_to_first_token_seconds")
    assert isinstance(times, Histogram)
    assert times.buckets["+Inf"] == times.count > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("enqueue", "llm_engine.add_request"),
        ("preprocess_chat", "apply_chat_template"),
        ("set_tokenizer", "tokenizer=DIRECTORY"),
        ("generat", "did you mean 'generate'"),
        ("wibble", "has no attribute 'wibble'"),
    ],
)
def test_missing_method_names_a_remedy(llm: LLM, name: str, sentence: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=sentence):
        getattr(llm, name)


def test_keywords_of_methods_are_accepted_or_refused(llm: LLM) -> None:
    theirs: dict[str, Any] = {"chat_template_content_format": "openai", "priority": None}
    (plain,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, **theirs)
    assert plain.outputs[0].text == ANSWER
    llm.sleep(level=0, mode="wait")  # type: ignore[call-arg]
    llm.wake_up()
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False)  # type: ignore[call-arg]
    for keyword, sentence in (
        (
            "prompt_token_ids",
            r"prompt_token_ids of LLM\.generate is not supported: a prompt of token ids is a list",
        ),
        ("mm_processor_kwargs", "give it in each prompt"),
    ):
        refused: dict[str, Any] = {keyword: [1]}
        with pytest.raises(ValidationError, match=sentence):
            llm.generate("Hello", **refused)
    with pytest.raises(TypeError, match=r"LLM\.generate has no argument 'use_tdqm'; did you mean 'use_tqdm'"):
        llm.generate("Hello", use_tdqm=False)  # type: ignore[call-arg]


def test_missing_tokenizer_method_names_a_remedy(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"Tokenizer\.get_vocab is not in quire: call vocabulary\(\)"):
        llm.get_tokenizer().get_vocab()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"encode\(text\) returns the token ids"):
        llm.get_tokenizer()("a")
    assert llm.get_tokenizer().encode("a", add_special_tokens=False)
    assert llm.get_tokenizer().eos_token_id is not None


def test_llm_of_engine_args_answers_alike() -> None:
    args = EngineArgs(
        model="quire-demo", max_model_len=128, kv_cache_memory_bytes=2**23, trust_remote_code=True
    )
    for llm in (LLM(**asdict(args)), LLM.from_engine_args(args)):
        assert llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text == ANSWER
        llm.shutdown()


def test_metrics_need_a_switch() -> None:
    llm = LLM("quire-demo", max_model_len=64, kv_cache_memory_bytes=2**23)
    with pytest.raises(ValidationError, match="disable_log_stats=False"):
        llm.get_metrics()
    llm.shutdown()


def test_engine_loop_of_scripts_ends() -> None:
    from quire.utils import random_uuid  # type: ignore[import-not-found]

    args = EngineArgs("quire-demo", max_model_len=64, disable_log_requests=True)
    engine = LLMEngine.from_engine_args(args, usage_context=None)  # type: ignore[call-arg]
    engine.add_request(random_uuid(), "Hello", SamplingParams(max_tokens=3))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert len(outputs) == 1
    with pytest.raises(AttributeError, match="config"):
        engine.vllm_config  # type: ignore[attr-defined]
    engine.shutdown()


def has_ended(engine: AsyncLLMEngine) -> bool:
    return all(client.process.poll() is not None for client in engine._clients)  # type: ignore[attr-defined]


async def streamed(engine: AsyncLLMEngine) -> str:
    text = ""
    async for output in engine.generate("Hello", SamplingParams(max_tokens=3, temperature=0), "a"):
        text = output.outputs[0].text
    return text


ASYNC_ARGS = AsyncEngineArgs(
    "quire-demo", max_model_len=64, kv_cache_memory_bytes=2**23, disable_log_requests=True
)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_async_engine_shuts_down_without_await(is_awaited: bool) -> None:
    async def script() -> AsyncLLMEngine:
        engine = AsyncLLMEngine.from_engine_args(ASYNC_ARGS)
        assert await streamed(engine)
        assert engine.get_tokenizer().eos_token
        assert engine.model_config.max_model_len == 64
        with pytest.raises(AttributeError, match="docs/training"):
            engine.start_weight_update  # type: ignore[attr-defined]
        done = engine.shutdown()
        if is_awaited:
            await done
            await engine.shutdown()
        return engine

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = asyncio.run(script())
    assert has_ended(engine)


def test_async_engine_shuts_down_behind_its_loop() -> None:
    async def script() -> AsyncLLMEngine:
        engine = AsyncLLMEngine.from_engine_args(ASYNC_ARGS)
        await streamed(engine)
        return engine

    engine = asyncio.run(script())
    engine.shutdown()
    assert has_ended(engine)


def test_format_of_the_checkpoint_is_compared() -> None:
    with pytest.raises(ConfigError, match="--quantization is awq, but the checkpoint is in floats; drop it"):
        LLM("quire-demo", quantization="awq")


def test_get_tokenizer_loads_by_name() -> None:
    from quire.transformers_utils.tokenizer import get_tokenizer  # type: ignore[import-not-found]

    assert get_tokenizer("quire-demo", trust_remote_code=True, tokenizer_mode="auto").encode("a")
    with pytest.raises(TypeError, match="'wibble'"):
        get_tokenizer("quire-demo", wibble=1)
