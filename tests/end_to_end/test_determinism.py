# SPDX-License-Identifier: Apache-2.0
"""The determinism contract (docs/design.md, section 9) from the outside: tokens and logprobs equal bit for bit.

The native kernels keep it; the torch reference, which runs where no compiler was found, does not.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.inputs import PromptType
from quire.kernels.cpu import library
from quire.outputs import RequestOutput
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.tiny_families import SCARCE_BLOCKS, STATE_BLOCKS, TINY_FAMILIES
from tests.fixtures.tiny_models import VOCAB_SIZE

LENGTHS = (3, 16, 17, 40, 5, 33, 48, 90)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True, logprobs=3)
FAMILIES = (
    "qwen3",
    "phi3-window-partial",
    "gemma3",
    "qwen2moe",
    "bamba",
    "deepseekv3",
)
OTHERS = sorted((TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()) - {*FAMILIES})
NUM_BLOCKS = {
    "mistral": 9,
    "phi3-window-partial": 9,
    "gemma2": 26,
    "gemma3": 17,
    "starcoder2": 9,
} | SCARCE_BLOCKS
"""Where layers have windows or states, requests hold fewer blocks, or more of smaller ones."""
STEP_LIMITS = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
"""Of models whose requests start with as little as they hold while they run."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "matmul_precision": "highest"},
    "bfloat16-auto": {"dtype": "bfloat16"},
    "bfloat16-int8-head": {"dtype": "bfloat16", "quantization_config": {"head": "int8"}},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-precise": {"quantization": "int8", "quantization_config": {"mode": "precise"}},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4-asymmetric": {
        "quantization": "int4-plain",
        "quantization_config": {"symmetric": False, "group_size": 64, "head": "int4-plain"},
    },
}

Result = list[tuple[list[int], list[list[float]]]]
"""Per request: its tokens, and the logprobs of each one's candidates."""


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Callable[..., LLM]:
    def make(weights: str, family: str = "llama-tied-bias", **args: Any) -> LLM:
        options = {"max_model_len": 128, "cpu_threads": 1, "enable_prefix_caching": False} | WEIGHTS[weights]
        return LLM(str(tiny_model(family)), **options | args)

    return make


def prompts(count: int = len(LENGTHS)) -> list[PromptType]:
    draw = random.Random(3)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run(llm: LLM, requests: list[PromptType]) -> Result:
    """Each prompt greedily and at random, all in one batch."""
    params = [GREEDY] * len(requests) + [RANDOM] * len(requests)
    return [result_of(output) for output in llm.generate([*requests, *requests], params, use_tqdm=False)]


def alone(llm: LLM, requests: list[PromptType]) -> Result:
    """The same, one request at a time."""
    pairs = [(prompt, params) for params in (GREEDY, RANDOM) for prompt in requests]
    return [result_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in pairs]


def result_of(output: RequestOutput, index: int = 0) -> tuple[list[int], list[list[float]]]:
    completion = output.outputs[index]
    assert completion.logprobs is not None
    return completion.token_ids, [[entry.logprob for entry in step.values()] for step in completion.logprobs]


@contextmanager
def every_loop_shared() -> Iterator[None]:
    """However short, and with its pieces taken in another order."""
    loaded = library.loaded()
    assert loaded is not None
    loaded.shuffle(12345)
    yield
    loaded.shuffle(0)


def check_contract(make: Callable[..., LLM], num_blocks: int = 20, **limits: int) -> None:
    """One model, every way of cutting up its work.

    With `num_blocks`, and steps within `limits`, requests are preempted.
    """
    scarce = {"num_gpu_blocks_override": num_blocks, **limits}
    plain = make()
    expected = run(plain, prompts())
    check_what_differs_most(make, plain, expected, scarce)
    assert run(make(cpu_threads=2), prompts()) == expected, "two threads"
    assert run(make(enforce_eager=True), prompts()) == expected, "kernel by kernel"
    for chunk in (16, 64):
        chunked = make(max_num_batched_tokens=chunk, max_num_seqs=16)
        assert run(chunked, prompts()) == expected, f"chunks of {chunk}"
    tiny = make(**scarce)
    assert run(tiny, prompts()) == expected, "preempted"
    assert tiny.llm_engine.call_core("stats")["num_preemptions"] > 0
    overlapped = make(async_scheduling=True, enable_prefix_caching=True, **scarce)
    assert run(overlapped, prompts()) == expected, "overlapped and preempted"
    assert overlapped.llm_engine.call_core("stats")["num_preemptions"] > 0
    check_swapping(make, plain, expected, scarce)


def check_what_differs_most(
    make: Callable[..., LLM], plain: LLM, expected: Result, scarce: dict[str, int]
) -> None:
    assert alone(plain, prompts()) == expected, "alone"
    with every_loop_shared():
        assert run(make(cpu_threads=3), prompts()) == expected, "three threads, all loops shared and shuffled"
    chunked = make(max_num_batched_tokens=7, max_num_seqs=7)
    assert run(chunked, prompts()) == expected, "chunks of 7"
    cached = make(enable_prefix_caching=True)
    assert run(cached, prompts()) == expected, "cold prefix cache"
    assert run(cached, prompts()) == expected, "warm prefix cache"
    assert cached.llm_engine.call_core("stats")["prefix_cache_hits"] > 0
    check_swapping(make, plain, expected, scarce | {"async_scheduling": True, "max_steps_in_flight": 3})


def check_swapping(make: Callable[..., LLM], plain: LLM, expected: Result, scarce: dict[str, int]) -> None:
    swapping = make(swap_space=0.01, preemption_mode="swap", **scarce)
    assert run(swapping, prompts()) == expected, f"swapped {scarce}"
    assert swapping.llm_engine.call_core("stats")["num_swaps"] > 0
    check_forks(swapping, plain)


def check_forks(llm: LLM, plain: LLM) -> None:
    """The completions of one prompt share its blocks; each is as if it had been asked for alone, with its seed."""
    many = [prompts()[i] for i in (0, 1, 5)]  # 3, 16 and 33 tokens
    outputs = llm.generate(many, RANDOM.clone(n=3), use_tqdm=False)
    forked = [[result_of(output, i) for i in range(3)] for output in outputs]
    seeds = [RANDOM.clone(seed=11 + i) for i in range(3)]
    expected = [
        [result_of(plain.generate([prompt], params, use_tqdm=False)[0]) for params in seeds]
        for prompt in many
    ]
    assert forked == expected, "forked"


@pytest.mark.item(42)
@pytest.mark.parametrize("weights", quick(WEIGHTS, ("bfloat16-auto", "int4")))
def test_every_weight_type(weights: str, engine: Callable[..., LLM], restore_threads: None) -> None:
    check_contract(functools.partial(engine, weights))


@pytest.mark.more
@pytest.mark.item(42)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_every_kind(family: str, engine: Callable[..., LLM], restore_threads: None) -> None:
    limits = STEP_LIMITS if family in STATE_BLOCKS else {}
    check_contract(functools.partial(engine, "float32", family), NUM_BLOCKS.get(family, 20), **limits)


@pytest.mark.item(42)
@pytest.mark.parametrize("family", quick_models(OTHERS, ()))
def test_every_other_family(family: str, engine: Callable[..., LLM], restore_threads: None) -> None:
    make = functools.partial(engine, "float32", family)
    limits = STEP_LIMITS if family in STATE_BLOCKS else {}
    scarce = {"num_gpu_blocks_override": NUM_BLOCKS.get(family, 20), **limits}
    plain = make()
    check_what_differs_most(make, plain, run(plain, prompts()), scarce)


@pytest.mark.parametrize("dtype", quick(["bfloat16", "int8"], ["int8"]))
def test_every_cache_type(dtype: str, engine: Callable[..., LLM], restore_threads: None) -> None:
    check_contract(functools.partial(engine, "bfloat16", kv_cache_dtype=dtype))


@pytest.mark.item(42)
def test_the_model_in_the_box(restore_threads: None) -> None:
    llm = LLM(max_model_len=256, enable_prefix_caching=False)
    many = prompts(64)
    expected = run(llm, many)
    for size in (1, 2, 5, 16):
        assert run(llm, many[:size]) == [*expected[:size], *expected[64 : 64 + size]], f"batch of {size}"
    one = LLM(max_model_len=256, max_num_batched_tokens=1, max_num_seqs=1)
    assert run(one, many[:4]) == [*expected[:4], *expected[64:68]], "one token a step"


@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_quantized_weights_still_give_the_model(weights: str, engine: Callable[..., LLM]) -> None:
    """The first token's logprobs stay near the float32 model's."""
    exact, ours = (run(engine(kind), prompts())[: len(LENGTHS)] for kind in ("float32", weights))
    for (_, want), (_, got) in zip(exact, ours, strict=True):
        limit = {"float32": 1e-6, "float16": 0.01, "bfloat16": 0.1, "int8": 0.2, "int4": 2.0}
        key = next(name for name in limit if weights.startswith(name))
        assert abs(got[0][0] - want[0][0]) <= limit[key]
