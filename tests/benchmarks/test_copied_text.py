# SPDX-License-Identifier: Apache-2.0
"""The model that copies, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.copied_text import SHAPE, prompt_to_copy, write_copier
from quire import LLM, SamplingParams

NUM_TOKENS = 60


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_copier_repeats_its_prompt_and_drafts_are_accepted(
    quantization: str | None, tmp_path: Path, restore_threads: None
) -> None:
    sizes = {"vocab_size": 3000, "hidden_size": 320, "intermediate_size": 64, "num_hidden_layers": 3}
    shape = json.loads(SHAPE.read_text()) | sizes | {"num_attention_heads": 5, "num_key_value_heads": 1}
    model = write_copier(tmp_path / "copier", shape)
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=256,
        cpu_threads=1,
        quantization=quantization,
        speculative_config={"method": "ngram", "adaptive": False},
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompt, copied = prompt_to_copy(NUM_TOKENS, shape["vocab_size"], seed=1)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert output.outputs[0].token_ids == copied
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > NUM_TOKENS // 2
