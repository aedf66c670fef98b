# SPDX-License-Identifier: Apache-2.0
"""Image encoders in GGUF: the tokens and logprobs of the same model as a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from tests.fixtures.mmproj_files import SEEING_CASES, write_both
from tests.fixtures.seeing_models import IMAGE_TOKEN

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False)


def answers(path: Path, marker: int, **options: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, tokens and logprobs for some images between text, and for text alone."""
    random = np.random.default_rng(0)
    pictures = [
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((40, 33), (20, 24))
    ]
    llm = LLM(str(path), device="cpu", dtype="float32", max_model_len=256, **options)
    prompts: list[Any] = [
        {"prompt_token_ids": [5, marker, 6, 7], "multi_modal_data": {"image": pictures[0]}},
        {"prompt_token_ids": [5, marker, 6, marker, 7], "multi_modal_data": {"image": pictures}},
        {"prompt_token_ids": [5, 6, 7]},
    ]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    llm.shutdown()
    found = []
    for output in outputs:
        (one,) = output.outputs
        logprobs = [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]
        found.append((list(output.prompt_token_ids), list(one.token_ids), logprobs))
    return found


@pytest.mark.parametrize("name", SEEING_CASES)
def test_answers_equal_those_of_the_directory(name: str, tmp_path: Path) -> None:
    whole, path = write_both(name, tmp_path)
    marker = IMAGE_TOKEN + (name == "gemma3")
    wanted, found = answers(whole, marker), answers(path, marker)
    for (prompt, tokens, logprobs), (mine, other, others) in zip(wanted, found, strict=True):
        assert (mine, other) == (prompt, tokens)
        assert np.abs(np.array(logprobs) - np.array(others)).max() < 2e-4
    assert len(found[0][0]) > 6
