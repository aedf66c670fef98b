# SPDX-License-Identifier: Apache-2.0
"""`LLM.generate_iter` and `LLM.chat_iter`: the outputs of `generate` and `chat`, as they finish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConflictError, ValidationError
from quire.outputs import RequestOutput

RANDOM = SamplingParams(temperature=1.0, max_tokens=12, logprobs=2)
ROWS = 3
PROMPTS = [f"The number {number} is {'very ' * (number % 5)}" for number in range(20)]
CHATS = [
    [{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("France", "Japan", "Italy")
]


def new_llm() -> LLM:
    return LLM("quire-demo", max_model_len=256, max_num_seqs=ROWS, kv_cache_memory_bytes=16 * 2**20)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return new_llm()


def contents(output: RequestOutput) -> Any:
    return [(one.text, one.token_ids, one.logprobs, one.finish_reason, one.answer) for one in output.outputs]


def test_outputs_are_those_of_generate_at_once() -> None:
    """Also where the engine draws the seeds, which it does in order of arrival."""
    several = [
        SamplingParams(temperature=1.0, max_tokens=2 + index % 7, n=1 + index % 2) for index in range(20)
    ]
    expected = new_llm().generate(PROMPTS, several, use_tqdm=False)
    found = list(new_llm().generate_iter(iter(PROMPTS), iter(several)))
    assert sorted(index for index, _ in found) == list(range(20))
    assert [index for index, _ in found] != list(range(20))
    for index, output in found:
        assert contents(output) == contents(expected[index])
        assert output.finished


def test_few_prompts_are_read_ahead(llm: LLM) -> None:
    num_read = most = num_finished = 0

    def prompts() -> Iterator[str]:
        nonlocal num_read, most
        for number in range(50):
            num_read += 1
            most = max(most, num_read - num_finished)
            yield f"{number}:"

    for _ in llm.generate_iter(prompts(), SamplingParams(max_tokens=3, temperature=0)):
        num_finished += 1
        assert llm.llm_engine.get_num_unfinished_requests() <= 2 * ROWS
    assert (num_read, num_finished) == (50, 50)
    assert most <= 3 * ROWS


@pytest.mark.parametrize("prompts", [[], iter([])])
def test_no_prompts_have_no_outputs(llm: LLM, prompts: Any) -> None:
    assert list(llm.generate_iter(prompts)) == []
    assert list(llm.chat_iter(prompts)) == []


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], {"prompt": "hello"}])
def test_single_prompt_yields_one_output(llm: LLM, prompt: Any) -> None:
    ((index, output),) = llm.generate_iter(prompt, RANDOM.clone(seed=1))
    assert index == 0
    assert contents(output) == contents(llm.generate(prompt, RANDOM.clone(seed=1), use_tqdm=False)[0])


def test_engine_is_busy_until_the_iterator_is_closed(llm: LLM) -> None:
    outputs = llm.generate_iter(PROMPTS, RANDOM)
    next(outputs)
    with pytest.raises(ConflictError, match="an iterator of outputs"):
        llm.generate("x", RANDOM, use_tqdm=False)
    outputs.close()  # type: ignore[attr-defined]
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert len(llm.generate("x", RANDOM, use_tqdm=False)) == 1


def test_bad_prompt_ends_the_iteration_and_frees_the_engine(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="maximum context length"):
        list(llm.generate_iter(["ok", "x " * 600], RANDOM))
    with pytest.raises(ValidationError, match="sampling_params has 1 entries"):
        list(llm.generate_iter(["a", "b"], [RANDOM]))
    with pytest.raises(ZeroDivisionError):
        list(llm.generate_iter(((1 // (3 - number) and "x") or "y" for number in range(9)), RANDOM))
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert len(llm.generate("x", RANDOM, use_tqdm=False)) == 1


def test_chats_have_the_answers_of_chat(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=30)
    expected = llm.chat(CHATS, greedy, use_tqdm=False)
    found = dict(llm.chat_iter(iter(CHATS), greedy))
    assert [contents(found[index]) for index in range(3)] == [contents(output) for output in expected]
    answer = found[0].outputs[0].answer
    assert answer is not None
    assert answer.content == "The capital of France is Paris."


def test_closed_chats_free_the_engine(llm: LLM) -> None:
    outputs = llm.chat_iter(CHATS * 5, RANDOM)
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert len(llm.chat(CHATS[0], RANDOM, use_tqdm=False)) == 1


def test_tools_are_checked_before_anything_is_read(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="tools"):
        llm.chat_iter(CHATS, tools=[{"type": "function"}])
