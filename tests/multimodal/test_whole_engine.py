# SPDX-License-Identifier: Apache-2.0
"""Models that see in a whole engine: a batch of prompts with images and without, by chunks of 64 tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.multimodal.worker import encoders
from tests.fixtures.seeing_models import SEEING, make_seeing
from tests.multimodal.worker.test_families import GREEDY, SPECIAL, logprobs_of, prompt_of


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma2", "qwen3-vl"])
def test_tokens_of_a_batch_equal_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders.EncoderStore, "_floats", lambda _self, arrays: arrays)
    family, model = SEEING[name], make_seeing(name, tmp_path)
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **limits)
    prompts = [prompt_of(family, kind, tmp_path) for kind in ("one", "late", "three", "text")]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt.token_ids, "media": prompt.media} for prompt in prompts], GREEDY
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        found = list(output.outputs[0].token_ids)
        want = logprobs_of(family, model, prompt, found)
        bias = torch.zeros(want.shape[1])
        bias[list(SPECIAL)] = torch.tensor(list(SPECIAL.values()))
        assert found == (want + bias).argmax(-1).tolist()
