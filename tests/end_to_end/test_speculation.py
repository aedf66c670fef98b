"""Speculation by every drafter on real models: tokens and logprobs are those of a run without it, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from tests.end_to_end.test_drafts import facts
from tests.end_to_end.test_overlapped import FEATURES, STEM, Job, overlapped, serve
from tests.fixtures.draft_heads import HEADS, write_mtp
from tests.fixtures.tiny_models import VOCAB_SIZE

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
ENGINES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 8, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 24},
    {"max_num_seqs": 1, "enable_prefix_caching": False},
    {"max_num_seqs": 4, "max_num_batched_tokens": 40, "scheduling_policy": "fair"},
    {"max_num_seqs": 32, "swap_space": 0.01, "num_gpu_blocks_override": 40},
    {"max_num_seqs": 6, "enforce_eager": True},
    {"max_num_seqs": 6, **overlapped(2)},
)
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "draft_model", "quantization": "int4", "adaptive": False, "num_speculative_tokens": 4},
    {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
    {"method": "suffix", "adaptive": False, "num_speculative_tokens": 5},
    {"method": "auto"},
    {"method": "recorded", "synthetic_acceptance_rate": 0.7, "adaptive": False},
    {"method": "medusa", "adaptive": False},
    {"method": "eagle", "quantization": "int8", "adaptive": False, "num_speculative_tokens": 3},
    {"method": "eagle3", "adaptive": False, "num_speculative_tokens": 5},
    {"method": "mtp", "adaptive": False, "num_speculative_tokens": 2},
)
LOW_LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
"""What heads read of families with any number of layers."""


def random_jobs(draw: random.Random, count: int) -> list[Job]:
    """Prompts and choices that make texts repeat themselves more or less."""
    jobs = []
    for number in range(count):
        phrase = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 9))]
        prompt = (STEM[: draw.randrange(20)] + phrase * draw.randrange(1, 5))[: draw.choice([9, 40, 60])]
        shape = {
            "temperature": draw.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5]),
            "top_k": draw.choice([0, 5, 40]),
            "top_p": draw.choice([1.0, 0.9]),
            "min_p": draw.choice([0.0, 0.05]),
            "logprobs": draw.choice([None, 0, 3]),
            "max_tokens": draw.randrange(5, 32),
        }
        feature = draw.choice([{}, draw.choice(FEATURES), {"allowed_token_ids": [60, 61, 62]}])
        if "logprob_token_ids" in feature:
            del shape["logprobs"]
        jobs.append(Job(prompt, SamplingParams(**(shape | {"seed": number} | feature))))
    return jobs


def record(path: Path, outputs: list[RequestOutput]) -> None:
    """What the drafter of that name reads."""
    found = [{"prompt_token_ids": o.prompt_token_ids, "token_ids": o.outputs[0].token_ids} for o in outputs]
    path.write_text(json.dumps(found))


def guessing_for(model: Path, method: str, expected: list[RequestOutput], directory: Path) -> dict[str, str]:
    """What `method` guesses by, if that is named: it is written to the directory, or is the model, rounded more."""
    path = directory / method
    if method == "recorded":
        record(path, expected)
    elif method in HEADS and not path.exists():
        HEADS[method].write(path, **LOW_LAYERS)
    if method == "draft_model":
        path = model
    return {"model": str(path)} if path.exists() else {}


def compare(
    seeds: range, tiny_model: Callable[[str], Path], family: str, directory: Path, num_jobs: int = 15
) -> tuple[int, int]:
    """Each scenario without and with speculation; how many tokens were drafted, and how many accepted."""
    drafted = accepted = 0
    with_mtp = write_mtp("qwen3.5moe", tiny_model("qwen3.5moe"), directory / "qwen3.5moe")
    for seed in seeds:
        draw = random.Random(seed)
        jobs = random_jobs(draw, num_jobs)
        method = METHODS[seed % len(METHODS)]
        model = with_mtp if method["method"] == "mtp" else tiny_model(family)
        args = {"model": str(model), "max_model_len": 96, **ENGINES[seed % len(ENGINES)]}
        args |= draw.choice(list(WEIGHTS.values()))
        expected, _ = serve(jobs, **args)
        method = method | guessing_for(model, method["method"], expected, directory)
        got, stats = serve(jobs, **args, speculative_config=method)
        assert facts(got) == facts(expected), f"scenario {seed}: {args} {method}"
        spec = stats["spec_decoding"] or {}
        assert spec["num_draft_tokens"] > 0 or method["method"] == "auto"
        drafted, accepted = drafted + spec["num_draft_tokens"], accepted + spec["num_accepted_tokens"]
    return drafted, accepted


def test_random_requests_of_every_method_are_as_without(
    tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    drafted, accepted = compare(range(len(METHODS)), tiny_model, "llama-tied-bias", tmp_path, num_jobs=6)
    assert drafted > accepted > 30


@pytest.mark.more
@pytest.mark.parametrize("family", ["llama-tied-bias", "gemma3", "qwen2moe"])
def test_five_hundred_random_requests_are_as_without(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    drafted, accepted = compare(range(100, 112), tiny_model, family, tmp_path)
    assert drafted > accepted > 300


def test_a_request_is_told_what_became_of_its_drafts(restore_threads: None) -> None:
    llm = LLM(cpu_threads=1, speculative_config={"method": "ngram", "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (output,) = llm.generate([[7, 8, 9] * 12], params)
    assert output.metrics.num_draft_tokens >= output.metrics.num_accepted_tokens
    assert output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto", "mtp"])
def test_a_model_that_is_pooled_has_nothing_to_guess(method: str) -> None:
    with pytest.raises(ConfigError, match="a model that is pooled says nothing that could be guessed"):
        LLM("quire-demo-embed", speculative_config={"method": method})
