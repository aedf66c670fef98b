# SPDX-License-Identifier: Apache-2.0
"""Language models with real weights: logprobs and greedy tokens equal to transformers' in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer
from tests.real.conftest import GGUF, oracle

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "¿Cuál es la capital de España? 東京は日本の",
)
NUM_TOKENS = 24
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")
FLOATS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024}
PRECISE = FLOATS | {"quantization_config": {"mode": "precise"}}


@pytest.mark.parametrize("name", GGUF)
def test_real_model_in_float32_equals_transformers(
    name: str, real: Callable[[str], Path], in_floats: Callable[[str], Path]
) -> None:
    """Both forms of the same weights: the directory in floats, and the GGUF file in the precise mode."""
    directory = in_floats(name)
    model = oracle(directory)
    tokenizer = Tokenizer.from_dir(directory)
    expected = [greedy(model, tokenizer.encode(prompt)) for prompt in PROMPTS]
    for path, options in ((directory, FLOATS), (real(name) / GGUF[name], PRECISE)):
        llm = LLM(str(path), **options)
        assert_logprobs(llm, model, tokenizer.encode(TEXT)[:256])
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in PROMPTS]
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        assert [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS] == [
            prompt["prompt_token_ids"] for prompt in prompts
        ]
        llm.shutdown()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """Return the tokens that transformers generates."""
    model.generation_config.eos_token_id = None  # nothing ends early
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
        )
    return list(whole[0, len(ids) :].tolist())


def assert_logprobs(llm: LLM, model: Any, ids: list[int]) -> None:
    """Compare the logprob of each token of a text with transformers'."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    assert output.prompt_logprobs is not None
    ours = [
        entry[token_id].logprob for entry, token_id in zip(output.prompt_logprobs, ids, strict=True) if entry
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]
    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0.0, atol=2e-3)
