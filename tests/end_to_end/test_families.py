# SPDX-License-Identifier: Apache-2.0
"""The whole engine against transformers: the same greedy tokens for every family, however the work is cut up."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.inputs import PromptType
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.hosted_models import HOSTED
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.tiny_families import SCARCE_BLOCKS, TINY_FAMILIES
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of

FAMILIES = (
    "llama",
    "llama-llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
    "opt",
    "gpt2",
    "bloom",
    "biogpt",
    "deepseekv3",
)
OTHERS = sorted((TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()) - {*FAMILIES})
SOME_HOSTED = ["bart", "bert", "laguna", "longcat-flash", "modernbert-decoder"]
"""What transformers' own code runs, and `FAMILIES` have not."""
LENGTHS = (1, 3, 8, 15, 16, 17, 40, 90)
NUM_BLOCKS = {"gemma2": 25, "gemma3": 17, "modernbert-decoder": 26} | SCARCE_BLOCKS
"""A cache in which requests are preempted; where layers differ, there are more blocks of fewer layers."""
NUM_TOKENS = 32
MAX_LEN = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TIE = 2e-4
"""Two logits closer than twice the logit tolerance may be chosen either way."""


def prompts() -> list[PromptType]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


oracle = functools.cache(oracle_of)


@torch.inference_mode()
def assert_greedy(directory: Path, prompt: list[int], generated: list[int]) -> None:
    """Every generated token must be transformers' most likely one, given the tokens before it."""
    logits = oracle(directory)(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max().item() < TIE


def engine(directory: Path, **args: Any) -> LLM:
    limits = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return LLM(str(directory), **(limits | {"num_gpu_blocks_override": 200} | args))


def generate(llm: LLM, params: SamplingParams = GREEDY) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts' tokens, and the engine's statistics afterwards."""
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    llm.llm_engine.call_core("check_integrity")
    stats: dict[str, Any] = llm.llm_engine.call_core("stats")
    assert stats.get("kv_cache_usage", 0.0) == 0.0
    found = [output.outputs[0].token_ids for output in outputs]
    assert all(len(tokens) == params.max_tokens for tokens in found)
    return found, stats


@pytest.mark.parametrize("name", [*quick_models([*FAMILIES, *OTHERS], FAMILIES), *quick(SOME_HOSTED, ())])
def test_greedy_tokens(name: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(name)
    roomy = engine(directory)
    whole, _ = generate(roomy)
    for prompt, tokens in zip(prompts(), whole, strict=True):
        assert isinstance(prompt, list)
        assert_greedy(directory, prompt, tokens)

    warm, stats = generate(roomy)
    assert warm == whole, "prefix hits"
    assert stats["prefix_cache_hits"] > 0

    scarce = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": NUM_BLOCKS.get(name, 14)}
    cut, stats = generate(engine(directory, **scarce))
    assert cut == whole, "chunked prefill with a budget of 16, and preemption"
    assert stats["num_preemptions"] > 0


@pytest.mark.more
@pytest.mark.parametrize("name", sorted(HOSTED.keys() - {*SOME_HOSTED, *FAMILIES}))
def test_transformers_backend_models_match_transformers_tokens(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """Many at once, in chunks, and again where prefixes are found."""
    directory = tiny_model(name)
    llm = engine(directory, max_num_batched_tokens=32)
    cut, _ = generate(llm, GREEDY.clone(max_tokens=8))
    for prompt, tokens in zip(prompts(), cut, strict=True):
        assert isinstance(prompt, list)
        assert_greedy(directory, prompt, tokens)
    warm, stats = generate(llm, GREEDY.clone(max_tokens=8))
    assert warm == cut
    assert stats["prefix_cache_hits"] > 0
