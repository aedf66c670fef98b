"""The determinism contract, from the outside: a request's tokens and logprobs, bit for bit, in any company.

Attention still runs on torch's reference, whose sums depend on how a batch is cut up; until it is replaced, logprobs
are compared bit for bit only where attention sees the same batch, and to a tolerance elsewhere. Tokens are equal
everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.fixtures.tiny_models import VOCAB_SIZE

LENGTHS = (3, 16, 17, 40, 5, 33, 48, 90)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-precise": {"quantization": "int8", "quantization_config": {"mode": "precise"}},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4-asymmetric": {
        "quantization": "int4",
        "quantization_config": {"symmetric": False, "group_size": 64},
    },
}

Result = list[tuple[list[int], list[list[float]]]]
"""Per request: its tokens, and the logprobs of each one's candidates."""

every_weight = pytest.mark.parametrize("weights", list(WEIGHTS))


@pytest.fixture
def restore_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Callable[..., LLM]:
    def make(weights: str, **args: Any) -> LLM:
        options = {"max_model_len": 128, "cpu_threads": 1, "enable_prefix_caching": False} | WEIGHTS[weights]
        return LLM(str(tiny_model("llama-tied-bias")), **options | args)

    return make


def prompts() -> list[dict[str, list[int]]]:
    draw = random.Random(3)
    return [{"prompt_token_ids": [draw.randrange(3, VOCAB_SIZE) for _ in range(n)]} for n in LENGTHS]


def run(llm: LLM, requests: list[dict[str, list[int]]]) -> Result:
    results = []
    for output in llm.generate(requests, PARAMS, use_tqdm=False):  # type: ignore[arg-type]
        completion = output.outputs[0]
        assert completion.logprobs is not None
        candidates = [[entry.logprob for entry in step.values()] for step in completion.logprobs]
        results.append((list(completion.token_ids), candidates))
    return results


def assert_close(got: Result, want: Result) -> None:
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)


@every_weight
def test_threads(weights: str, engine: Callable[..., LLM], restore_threads: None) -> None:
    one, two = (run(engine(weights, cpu_threads=threads), prompts()) for threads in (1, 2))
    assert one == two


@every_weight
def test_alone_or_in_a_batch(weights: str, engine: Callable[..., LLM]) -> None:
    llm = engine(weights)
    together = run(llm, prompts())
    alone = [run(llm, [prompt])[0] for prompt in prompts()]
    assert_close(alone, together)
    assert run(llm, prompts()) == together, "the same batch again"
    # Requests that start together and are equally long: attention sees one batch, the linears another number of rows.
    twins = [prompts()[3]] * 2
    assert len({repr(result) for result in run(llm, twins)}) == 1


@every_weight
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunk_sizes(weights: str, chunk: int, engine: Callable[..., LLM]) -> None:
    whole = run(engine(weights), prompts()[3:4])
    assert_close(run(engine(weights, max_num_batched_tokens=chunk, max_num_seqs=1), prompts()[3:4]), whole)


@every_weight
def test_cold_or_warm_prefix(weights: str, engine: Callable[..., LLM]) -> None:
    llm = engine(weights, enable_prefix_caching=True)
    cold = [run(llm, [prompt])[0] for prompt in prompts()]
    warm = [run(llm, [prompt])[0] for prompt in prompts()]
    assert_close(warm, cold)


@every_weight
def test_quantised_weights_still_give_the_model(weights: str, engine: Callable[..., LLM]) -> None:
    """The first token's logprobs stay near the float32 model's."""
    exact, ours = (run(engine(kind), prompts()) for kind in ("float32", weights))
    for (_, want), (_, got) in zip(exact, ours, strict=True):
        limit = {"float32": 1e-6, "float16": 0.01, "bfloat16": 0.1, "int8": 0.2, "int4": 2.0}
        key = next(name for name in limit if weights.startswith(name))
        assert abs(got[0][0] - want[0][0]) <= limit[key]
